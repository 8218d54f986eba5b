"""Held saves: their record, the generation (it does not count as one without progress), and the shown sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.kv.records import Phase
from strata.core.stop.save_hold import (
    MAX_HOST_CHARS,
    MAX_REASON_CHARS,
    SaveHold,
    decide_hold_saves,
    no_checkpoint,
)
from strata.errors import InvalidArgument, Refused, StaleGeneration, StaleIncarnation
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import Job as Saving
from tests.unit.core.rig import author_of, plan
from tests.unit.core.worlds.test_planning import Job, head, phase

FULL = "disk full"


def hold(job: Job | Saving, step: int, *, rank: int = 0, host: str = "a", reason: str = FULL) -> str:
    author = author_of(job.store.live, rank)
    decision = job.store.settle(
        lambda view: decide_hold_saves(view, author=author, step=step, reason=reason, host=host)
    )
    return decision.reason


# -- the record


@pytest.fixture
def job() -> Saving:
    return Saving()


def test_the_first_rank_of_a_generation_to_hold_its_save_is_on_record(job: Saving) -> None:
    hold(job, 20, rank=2, host="b")
    hold(job, 24, rank=0)
    record = not_none(job.store.live.held(1))
    assert (record.step, record.rank, record.worker, record.host, record.reason) == (20, 2, "b", "b", FULL)


def test_a_rank_that_has_not_trained_since_its_generation_began_is_not_on_record(job: Saving) -> None:
    assert "has not trained beyond step 0" in hold(job, 0)
    assert job.store.live.held(1) is None
    job.save(20)
    job.next_world()
    assert "has not trained beyond step 20" in hold(job, 20)
    assert job.store.live.held(2) is None
    hold(job, 21)
    assert job.store.live.held(2) is not None


def test_only_a_rank_of_the_current_world_may_hold_its_saves(job: Saving) -> None:
    old = author_of(job.store.live, 0)
    stranger = replace(old, rank=2)
    with pytest.raises(Refused):
        job.store.settle(lambda view: decide_hold_saves(view, author=stranger, step=9, reason=FULL, host="a"))
    with pytest.raises(InvalidArgument):
        hold(job, -1)
    job.next_world()
    with pytest.raises((StaleGeneration, StaleIncarnation)):
        job.store.settle(lambda view: decide_hold_saves(view, author=old, step=9, reason=FULL, host="a"))


def test_the_reason_and_host_of_a_hold_are_bounded(job: Saving) -> None:
    hold(job, 20, reason="x" * 9999, host="h" * 9999)
    record = not_none(job.store.live.held(1))
    assert (len(record.reason), len(record.host)) == (MAX_REASON_CHARS, MAX_HOST_CHARS)


# -- the world


def failing(job: Job, times: int, *, held: bool) -> None:
    """Let `times` generations each train for a step and end by a failing rank."""
    job.go()
    for _ in range(times):
        if held:
            hold(job, 4)
        job.play("exit 0 1, go")


def test_generations_that_trained_and_could_not_save_do_not_fail_the_job() -> None:
    job = Job(3, limit=3)
    failing(job, 5, held=True)
    assert phase(job.store) is None
    assert (head(job.store).generation, head(job.store).no_progress, head(job.store).failures) == (6, 0, 5)
    assert "saves were held: disk full on host a" in head(job.store).reason
    failing(job, 3, held=False)
    assert not_none(phase(job.store)).phase is Phase.FAILED, "as ever, once no save is held"


def test_a_held_save_neither_counts_nor_resets() -> None:
    job = Job(3, limit=3)
    failing(job, 1, held=False)
    failing(job, 1, held=True)
    assert head(job.store).no_progress == 1
    failing(job, 1, held=False)
    assert head(job.store).no_progress == 2
    hold(job, 4)
    job.play("commit 8, exit 0 1, go")
    assert head(job.store).no_progress == 0, "it healed, and what was held was committed"
    assert "saves were held" not in head(job.store).reason


def test_a_leader_that_has_not_seen_the_hold_cannot_fail_the_job() -> None:
    job = Job(3, limit=1)
    job.play("go, exit 0 1")
    planned = plan(job.store, job.epoch)
    assert "is failed" in planned.reason
    hold(job, 4)
    assert not job.store.execute(planned.txns[-1]).succeeded
    assert "generation 2" in job.go()


def test_max_generations_counts_generations_with_held_saves() -> None:
    job = Job(limit=3)
    job.spec["max_generations"] = 2
    job.play("join w0, join w1, join w2")
    failing(job, 2, held=True)
    assert "as many as max_generations allows" in not_none(phase(job.store)).reason


# -- the sentence


@pytest.mark.parametrize(
    ("committed", "held_s", "says"),
    [
        (40, 240.0, "no checkpoint since step 40, 4 min: disk full on host a"),
        (None, 12.4, "no checkpoint yet, 12 s: disk full on host a"),
    ],
)
def test_the_sentence_of_a_held_save_names_time_reason_and_host(
    committed: int | None, held_s: float, says: str
) -> None:
    held = SaveHold(step=44, reason=FULL, host="a", held_s=held_s)
    assert no_checkpoint(held, committed_step=committed) == says
