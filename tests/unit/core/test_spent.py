"""Members that cannot restart: they belong to one generation that had begun, and no world that holds one grows."""

from __future__ import annotations

import pytest

from strata.core.agreement import BEGIN_BARRIER, Verdict
from strata.core.spent import SPENT_S
from strata.core.stopping import next_deadline_s, revisions
from strata.core.worlds import needs_settling
from tests.unit.core.rig import leave, register, released, world_of
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
def test_a_world_that_holds_one_does_not_grow(begun: bool, newcomer_cannot: bool) -> None:
    job = standalone("a", "b", begun=begun)
    come(job, "c", cannot_restart=newcomer_cannot)
    job.go(settled=True)
    assert (job.head.generation, set(world_of(job.store))) == (1, {"a", "b"})
    assert not needs_settling(job.store.live, {})


def test_a_world_of_others_grows_by_one_that_cannot_restart() -> None:
    job = Job(1, least=1, most=3)
    job.go(settled=True)
    come(job, "z")
    job.go(settled=True)
    job.agree(1, Verdict.NO_TIME)
    job.go(settled=True)
    assert job.head.generation == 2
    assert "z" in world_of(job.store)


def test_after_a_death_the_world_is_made_of_those_who_stood_by() -> None:
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
    assert (job.head.failures, job.head.fruitless) == (1, 1)
    assert job.store.problems() == []


def test_one_that_has_not_left_yet_gets_no_place_though_the_next_world_lacks_it() -> None:
    job = standalone("a", "b", least=2, most=2)
    come(job, "c")
    leave(job.store, "a")
    job.go(settled=True)
    assert job.head.forming
    job.go(settled=True, asked_s=SPENT_S - 0.1)
    assert job.head.forming, "b is about to leave"
    leave(job.store, "b")
    come(job, "b")
    job.go()
    assert set(world_of(job.store)) == {"b", "c"}, "it was started again"
    assert job.head.spent == ()
    assert job.store.problems() == []


def test_one_that_had_not_begun_after_all_gets_a_place_in_the_end() -> None:
    """It missed the outcome of `strata.begin`: it goes to a newer world, and waits for a place there."""
    job = standalone("a", "b", least=1, most=2)
    leave(job.store, "a")
    job.go()
    assert job.head.forming
    (known,) = revisions(job.store.live)
    assert next_deadline_s(job.store.live, {known: 1.0}) == pytest.approx(SPENT_S - 1.0)
    job.go(settled=True, asked_s=SPENT_S)
    assert set(world_of(job.store)) == {"b"}
    assert job.store.problems() == []


def test_before_they_have_begun_they_go_on_in_the_next_world() -> None:
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
