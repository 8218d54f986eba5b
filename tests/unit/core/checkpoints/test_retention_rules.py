from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.checkpoints.references import Keep
from strata.core.checkpoints.retention_rules import Candidate, check_keep, kept, newest_of_each_step
from strata.core.kv.records import CheckpointType
from strata.errors import InvalidArgument

HOUR_MS = 3_600_000


def made(step: int, *, generation: int = 1, superseded: bool = False, **more: object) -> Candidate:
    fields = {"type": CheckpointType.FULL, "created_unix_ms": step * HOUR_MS, **more}
    return Candidate(
        key=f"{generation}/{step}",
        step=step,
        counts=(generation, step),
        superseded=superseded,
        **fields,  # type: ignore[arg-type]  # named fields
    )


def stay(steps: list[Candidate], now_h: int = 1000, **keep: Any) -> list[int]:
    names = kept(steps, Keep(**keep), now_unix_ms=now_h * HOUR_MS)
    return sorted(int(name.rpartition("/")[2]) for name in names)


EVERY_20 = [made(step) for step in range(20, 220, 20)]


MODELS = [made(s, generation=2, type=CheckpointType.MODEL_ONLY) for s in (1, 2)]
INCREMENTALS = [made(s, generation=3, type=CheckpointType.INCREMENTAL) for s in (4, 5)]
BACK_AT_20 = [made(20, generation=2), made(40, superseded=True), made(60, superseded=True)]


@pytest.mark.parametrize(
    ("candidates", "keep", "stays"),
    [
        (EVERY_20, {}, list(range(20, 220, 20))),
        (EVERY_20, {"latest": 3}, [160, 180, 200]),
        (EVERY_20, {"latest": 1, "every_steps": 50}, [60, 100, 160, 200]),
        ([made(0), *EVERY_20], {"latest": 1, "every_steps": 100}, [0, 100, 200]),
        (EVERY_20, {"latest": 1, "age_ms": 50 * HOUR_MS, "now_h": 200}, [160, 180, 200]),
        # partial states are counted separately from whole ones
        ([made(3, generation=3), *MODELS, *INCREMENTALS], {"latest": 1}, [2, 5]),
        # an abandoned history: 20 counts in generation 2; superseded ones stay until it has `latest` checkpoints
        (BACK_AT_20, {"latest": 2}, [20, 40, 60]),
        ([*BACK_AT_20, made(30, generation=2)], {"latest": 2}, [20, 30]),
    ],
)
def test_retention_rules_keep_the_expected_checkpoints(
    candidates: list[Candidate], keep: dict[str, int], stays: list[int]
) -> None:
    assert stay(candidates, **keep) == stays


def test_the_newest_attempt_represents_its_step() -> None:
    part = CheckpointType.MODEL_ONLY
    attempts = [
        made(5, generation=3, type=CheckpointType.INCREMENTAL),
        made(5),
        made(6),
        made(5, generation=2),
        made(6, generation=4, type=part),
    ]
    assert [c.key for c in newest_of_each_step(attempts)] == ["3/5", "1/6", "4/6"]


def test_the_best_checkpoints_by_a_metadata_metric_are_kept() -> None:
    scored = [
        made(s, metadata={"loss": str(v)}) for s, v in ((1, 0.5), (2, 0.1), (3, 0.1), (4, "nan"), (5, "x"))
    ]
    scored.append(made(6))
    assert stay(scored, latest=1, best=2, metric="loss") == [2, 3, 6]
    assert stay(scored, latest=1, best=1, metric="loss", highest=True) == [1, 6]


def test_retention_rules_add_up_and_each_gives_its_reason() -> None:
    rules = Keep(latest=1, every_steps=100, age_ms=30 * HOUR_MS)
    reasons = kept(EVERY_20, rules, now_unix_ms=200 * HOUR_MS)
    assert reasons == {
        "1/100": "the first from step 100 on",
        "1/180": "younger than 30 h",
        "1/200": "one of the 1 newest",
    }


@pytest.mark.parametrize(
    "keep",
    [
        Keep(latest=-1),
        Keep(latest=1, best=1),
        Keep(latest=1, metric="loss"),
        Keep(every_steps=10),
        Keep(age_ms=5),
    ],
)
def test_rules_that_make_no_sense_are_refused(keep: Keep) -> None:
    with pytest.raises(InvalidArgument):
        check_keep(keep)


@given(
    steps=st.lists(st.integers(0, 500), unique=True, max_size=30),
    latest=st.integers(1, 5),
    every=st.integers(0, 60),
    age=st.integers(0, 400),
)
def test_more_rules_never_give_up_more_and_the_newest_always_stays(
    steps: list[int], latest: int, every: int, age: int
) -> None:
    candidates = [made(step) for step in steps]
    few = stay(candidates, latest=latest, now_h=500)
    more = stay(candidates, latest=latest, every_steps=every, age_ms=age * HOUR_MS, now_h=500)
    assert set(few) <= set(more)
    assert not steps or max(steps) in few
    assert len(few) == min(latest, len(steps))
