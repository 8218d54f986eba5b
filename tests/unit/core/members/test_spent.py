"""Spent members cannot restart: each stays in one begun generation, and a world with such a member does not grow."""

from __future__ import annotations

import pytest

from strata.core.checkpoints.fork import decide_rewind
from strata.core.job_requests import decide_scale
from strata.core.members.spent import SPENT_S
from strata.core.stop.last_step import BEGIN_BARRIER
from strata.core.stop.requests import next_deadline_s, revisions
from strata.core.worlds.planning import needs_settling
from tests.not_none import not_none
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import carry_out, leave, register, released, world_of
from tests.unit.core.stop_job import DRAIN, Job


def standalone(*names: str, least: int = 1, most: int = 3, begun: bool = True) -> Job:
    """Return a job in which these standalone processes train."""
    job = Job(0, least=least, most=most)
    come(job, *names)
    job.go(settled=True)
    if begun:
        released(job.store, BEGIN_BARRIER)
    return job


def come(job: Job, *names: str, cannot_restart: bool = True) -> None:
    for name in names:
        register(job.store, name, slots=1, cannot_restart=cannot_restart, **job.spec)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("newcomer_cannot", [False, True])
def test_a_world_with_a_member_that_cannot_restart_does_not_grow(begun: bool, newcomer_cannot: bool) -> None:
    job = standalone("a", "b", begun=begun)
    come(job, "c", cannot_restart=newcomer_cannot)
    job.go(settled=True)
    assert (job.head.generation, set(world_of(job.store)), job.notice) == (1, {"a", "b"}, None)
    assert not needs_settling(job.store.live, {})


def test_a_world_of_members_that_cannot_restart_is_not_shrunk() -> None:
    job = standalone("a", "b")
    job.store.settle(lambda seen: decide_scale(seen, max_workers=1))
    assert "goes on with 2 members, not 1: too few of them could restart" in job.go(settled=True)
    assert (job.head.generation, job.notice) == (1, None)
    leave(job.store, "a")
    leave(job.store, "b")
    come(job, "a", "b")
    job.go(settled=True)
    assert len(world_of(job.store)) == 1


def test_a_world_of_restartable_members_grows_by_a_member_that_cannot_restart() -> None:
    job = Job(0, least=1, most=3)
    job.join("w0")
    job.go(settled=True)
    come(job, "z")
    job.go(settled=True)
    assert job.head.generation == 2
    assert "z" in world_of(job.store)


def test_after_a_death_the_world_is_made_of_the_standbys() -> None:
    job = standalone("a", "b", most=2)
    come(job, "c")
    job.go(settled=True)
    leave(job.store, "a")
    job.go()
    assert (job.head.generation, set(world_of(job.store))) == (2, {"c"})
    assert [one.worker for one in job.head.spent] == ["b"]
    leave(job.store, "b")
    job.go(settled=True)
    assert job.head.generation == 2, "its end is none of that world's business"
    assert (job.head.failures, job.head.no_progress) == (1, 1)
    assert job.store.problems() == []


def test_a_spent_member_gets_no_slot_in_the_next_world_until_it_is_restarted() -> None:
    job = standalone("a", "b", least=2, most=2)
    come(job, "c")
    leave(job.store, "a")
    job.go(settled=True)
    assert job.head.forming
    job.go(settled=True, request_ages_s=SPENT_S - 0.1)
    assert job.head.forming, "b is about to leave"
    leave(job.store, "b")
    come(job, "b")
    job.go()
    assert set(world_of(job.store)) == {"b", "c"}, "it was started again"
    assert job.head.spent == ()
    assert job.store.problems() == []


def test_a_spent_member_that_had_not_begun_gets_a_place_after_a_timeout() -> None:
    """The member missed the outcome of `strata.begin`, so it waits for a place in a newer world."""
    job = standalone("a", "b", least=1, most=2)
    leave(job.store, "a")
    job.go()
    assert job.head.forming
    (known,) = revisions(job.store.live)
    assert next_deadline_s(job.store.live, {known: 1.0}) == pytest.approx(SPENT_S - 1.0)
    job.go(settled=True, request_ages_s=SPENT_S)
    assert set(world_of(job.store)) == {"b"}
    assert job.store.problems() == []


def test_members_that_have_not_begun_continue_in_the_next_world() -> None:
    job = standalone("a", "b", begun=False)
    leave(job.store, "a")
    job.go()
    assert (job.head.generation, set(world_of(job.store)), job.head.spent) == (2, {"b"}, ())


def test_members_that_restart_are_not_spent() -> None:
    job = Job(2, most=3)
    job.go(settled=True)
    come(job, "z")
    released(job.store, BEGIN_BARRIER)
    job.stop(DRAIN, next(iter(world_of(job.store))))
    leave(job.store, next(iter(world_of(job.store))))
    job.go()
    assert job.head.spent == ()


def test_a_rewind_waits_until_members_that_cannot_restart_were_started_again() -> None:
    job = KeptJob(20, 40)
    leave(job.store, "a")
    job.plan()
    register(job.store, "a", cannot_restart=True)
    carry_out(job.store, job.epoch, settled=True)
    generation = job.author(0).generation
    released(job.store, BEGIN_BARRIER, generation)
    job.store.settle(lambda seen: decide_rewind(seen, generation=generation, step=20, who="ada"))
    job.plan()
    head = not_none(job.store.job().head()).record
    assert (head.forming, head.restore) == (True, None), head.reason
    assert job.store.job().rewind() is not None, "a forming world begins nowhere"
    leave(job.store, "a")
    register(job.store, "a", cannot_restart=True)
    carry_out(job.store, job.epoch, settled=True)
    assert not_none(not_none(job.store.job().head()).record.restore).step == 20
    job.sound()
