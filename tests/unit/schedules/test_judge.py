"""The judge of schedules must accept a good history, and reject each doctored history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.ranks.learning import reference
from tests.schedules.judge import History, Looked, NodeEnd, judge

VALUES = reference(1)[:7]
TOTAL = len(VALUES) - 1


def rank(generation: int, at: float, first: int, last: int, *, number: int = 0) -> list[dict[str, Any]]:
    """Return the events of one rank that begins at step `first` and trains to `last`."""
    place = {"source": f"n{number}", "rank": number, "generation": generation}
    start = {"event": "start", **place, "at": at, "step": first, "value": str(VALUES[first]), "world": 2}
    steps = [
        {"event": "step", **place, "step": step, "value": str(VALUES[step])}
        for step in range(first + 1, last + 1)
    ]
    end = {"event": "end", **place, "step": TOTAL, "value": str(VALUES[-1])}
    end |= {"unix_s": 1100.0, "spent_s": {"step": 90.0, "lost": 9.8}}
    return [start, *steps, *([end] if last == TOTAL else [])]


def good() -> History:
    """Two ranks that are killed after step 4, when step 3 is committed."""
    first = [*rank(1, 10.0, 0, 4), *rank(1, 10.1, 0, 4, number=1)]
    second = [*rank(2, 20.0, 3, TOTAL), *rank(2, 20.2, 3, TOTAL, number=1)]
    return History(
        events=[*first, *second],
        looked=[Looked(at=12.0, step=3), Looked(at=21.0, step=6)],
        nodes=[NodeEnd(name="n0", code=0, late=False), NodeEnd(name="n1", code=78, late=True)],
        committed=[(2, 6), (1, 3)],
        began_unix_s=1000.0,
    )


def test_a_good_history_is_taken() -> None:
    assert judge(good(), VALUES) == []


def without(history: History, **facts: object) -> History:
    return replace(
        history, events=[e for e in history.events if any(e.get(k) != v for k, v in facts.items())]
    )


def changed(history: History, where: dict[str, object], **to: object) -> History:
    return replace(
        history,
        events=[e | to if all(e.get(k) == v for k, v in where.items()) else e for e in history.events],
    )


@pytest.mark.parametrize(
    ("doctored", "words"),
    [
        (changed(good(), {"event": "end"}, spent_s={"step": 98.0}), "the time went to 98.00 s, of 100.00 s"),
        (without(good(), event="step", generation=2, rank=0, step=5), "trained step 6 after 4"),
        (changed(good(), {"event": "step", "step": 4, "generation": 2}, value="7"), "wrong parameter"),
        (changed(good(), {"event": "start", "generation": 2, "rank": 1}, step=2), "began differently"),
        (changed(good(), {"event": "start", "generation": 2}, value="1"), "wrong parameter after step 3"),
        (replace(good(), looked=[Looked(at=12.0, step=4)]), "although 4 was committed"),
        (replace(good(), committed=[(1, 4), (2, 3)]), "committed step 3"),
        (replace(good(), committed=[(2, 3), (2, 6)]), "twice"),
        (without(good(), event="end"), "no rank came to the end"),
        (changed(good(), {"event": "end", "rank": 1}, step=5), "ended at step 5"),
        (replace(good(), nodes=[NodeEnd(name="n0", code=None, late=True)]), "did not end"),
        (replace(good(), nodes=[NodeEnd(name="n0", code=78, late=False)]), "ended with 78"),
        (replace(good(), nodes=[NodeEnd(name="n0", code=1, late=True)]), "ended with 1"),
        (replace(good(), nodes=[NodeEnd(name="n0", code=0, late=False, left={7: "python"})]), "left"),
    ],
)
def test_a_doctored_history_is_rejected(doctored: History, words: str) -> None:
    broken = judge(doctored, VALUES)
    assert any(words in wrong for wrong in broken), broken


def test_a_commit_that_a_newer_generation_may_have_made_proves_nothing() -> None:
    """Ranks of generation 1 begin late, after generation 2 committed step 6."""
    late = rank(1, 30.0, 0, 0, number=3)
    history = replace(good(), events=[*good().events, *late], looked=[Looked(at=21.0, step=6)])
    assert judge(history, VALUES) == []
