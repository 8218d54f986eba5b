"""Members without a supervisor leave to begin anew: the next world waits for them, once and not for ever."""

from __future__ import annotations

import pytest

from strata.core.agreement import BEGIN_BARRIER, Verdict
from strata.core.returning import LOST_S, RETURN_S, return_s
from strata.core.stopping import next_deadline_s, revisions
from strata.core.worlds import needs_settling
from tests.unit.core.rig import agreed, carry_out, leave, register, released, world_of
from tests.unit.core.stop_job import DRAIN, PAUSE, PREEMPT, Job


def lone(*names: str, least: int = 1, most: int = 3, begun: bool = True) -> Job:
    """Return a job that these lone members train in: each leaves at its world's end and comes back."""
    job = Job(0, least=least, most=most)
    come(job, *names)
    job.go(settled=True)
    if begun:
        released(job.store, BEGIN_BARRIER)
    return job


def come(job: Job, *names: str) -> None:
    for name in names:
        register(job.store, name, reexecutes=True, **job.spec)


def grow(job: Job, name: str) -> None:
    come(job, name)
    job.go(settled=True)
    agreed(job.store, 20, Verdict.NO_TIME)
    job.go(settled=True)


@pytest.fixture
def job() -> Job:
    return lone("a", "b")


def test_a_larger_world_waits_until_those_who_leave_for_it_are_back(job: Job) -> None:
    grow(job, "c")
    assert (job.head.generation, job.head.forming) == (2, True)
    assert "2 members begin anew for it" in job.head.reason
    leave(job.store, "a")
    job.go(settled=True)
    leave(job.store, "b")
    come(job, "a")
    assert "waiting for b" in job.go(settled=True)
    assert job.head.generation == 2, "or a world of two would be followed by one of three"
    come(job, "b")
    assert "who began anew are back" in job.go()
    assert (job.head.generation, set(world_of(job.store))) == (3, {"a", "b", "c"})
    assert (job.head.failures, job.head.fruitless, job.head.returning) == (0, 0, ())
    assert job.store.problems() == []


def test_who_has_not_left_yet_is_waited_for_too(job: Job) -> None:
    grow(job, "c")
    leave(job.store, "a")
    come(job, "a")
    assert "waiting for b" in job.go(settled=True), "b is still here as what it was, and about to leave"
    assert job.head.generation == 2


def test_who_does_not_come_back_is_waited_for_once(job: Job) -> None:
    grow(job, "c")
    leave(job.store, "a")
    leave(job.store, "b")
    come(job, "a")
    assert not needs_settling(job.store.live, {})
    (known,) = revisions(job.store.live)
    assert next_deadline_s(job.store.live, {known: 1.0}) == pytest.approx(RETURN_S - 1.0)
    job.go(settled=True, asked_s=RETURN_S - 0.1)
    assert job.head.generation == 2
    assert "settling" in job.go(asked_s=RETURN_S), (
        "or one that comes a moment later would be late for the world"
    )
    assert needs_settling(job.store.live, {known: RETURN_S})
    assert "b had not come back in time" in job.go(settled=True, asked_s=RETURN_S)
    assert (job.head.generation, set(world_of(job.store))) == (3, {"a", "c"})


def test_who_is_late_comes_into_the_same_world_while_those_here_settle(job: Job) -> None:
    grow(job, "c")
    leave(job.store, "a")
    leave(job.store, "b")
    job.go(asked_s=RETURN_S)
    assert job.head.generation == 2
    come(job, "a", "b")
    assert "who began anew are back" in job.go(asked_s=RETURN_S + 1.0)
    assert set(world_of(job.store)) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("what", "wait_s"),
    [
        ("it grew", RETURN_S),
        ("one died", LOST_S),
        ("one failed", LOST_S),
        ("one was drained", LOST_S),
        ("one was drained and is gone", LOST_S),
    ],
)
def test_how_long_those_who_begin_anew_are_waited_for(what: str, wait_s: float) -> None:
    """Who died at the same moment as another, or was taken away with it, is awaited in vain: not for long."""
    job = Job(0, least=1, most=3)
    for name in ("a", "b"):
        register(job.store, name, slots=1, reexecutes=True, **job.spec)
    job.go(settled=True)
    released(job.store, BEGIN_BARRIER)
    if what == "it grew":
        grow(job, "c")
    elif what == "one died":
        leave(job.store, "b")
    elif what == "one failed":
        job.ends(1, code=1)
    else:
        job.stop(DRAIN, "b")
        if what == "one was drained":
            job.ends(0, 1)
        else:
            leave(job.store, "b")
    job.go()
    assert "a" in [one.worker for one in job.head.returning]
    assert return_s(job.head) == wait_s
    leave(job.store, "a")
    come(job, "d")  # enough for a world, which is not made yet
    job.go(settled=True, asked_s=wait_s - 0.1)
    assert job.head.forming
    job.go(settled=True, asked_s=wait_s)
    assert "d" in world_of(job.store)


@pytest.mark.parametrize("start_s", [10.0, 16.0, 40.0, 80.0])
@pytest.mark.parametrize("begins", ["grows", "loses one"])
def test_members_settle_in_one_world_however_long_their_programs_take_to_start(
    begins: str, start_s: float
) -> None:
    """Each that leaves is back `start_s` later, a second after the one before it; worlds settle for 2 s."""
    job = lone("a", "b", "c") if begins == "loses one" else lone("a", "b")
    if begins == "loses one":
        leave(job.store, "c")
        come(job, "d")
        job.go()
    else:
        grow(job, "d")
    now, back, held = 0.0, dict[str, float](), (0, 0.0)
    settling: float | None = None
    while now - held[1] < 110.0:  # the longest wait is over, and it stays
        assert now < 1000.0, "they never settle"
        now += 1.0
        if job.head.generation != held[0]:
            held, settling = (job.head.generation, now), None
            for one in job.head.returning:
                leave(job.store, one.worker)
                back[one.worker] = now + start_s + len(back)
        for name in [name for name, at_s in back.items() if at_s <= now]:
            del back[name]
            come(job, name)
        age_s = dict.fromkeys(revisions(job.store.live), now - held[1])
        if not needs_settling(job.store.live, age_s):
            settling = None
        elif settling is None:
            settling = now
        job.go(settled=settling is not None and now - settling >= 2.0, asked_s=now - held[1])
        if job.head.members:  # they begin, and save when another world is to follow
            generation = job.head.generation
            if not job.store.live.met(BEGIN_BARRIER, generation):
                released(job.store, BEGIN_BARRIER, generation)
            elif job.notice is not None:
                job.agree(20, Verdict.NO_TIME)
    assert set(world_of(job.store)) == {"a", "b", "d"}
    assert job.head.generation <= (5 if begins == "loses one" else 3)


def test_too_few_are_waited_for_as_ever() -> None:
    job = lone("a", "b", least=2, most=3)
    grow(job, "c")
    leave(job.store, "a")
    leave(job.store, "b")
    assert "2 are needed" in job.go(settled=True, asked_s=RETURN_S)
    assert job.head.generation == 2
    come(job, "b")
    assert "settling" in job.go(asked_s=RETURN_S)
    job.go(settled=True, asked_s=RETURN_S)
    assert set(world_of(job.store)) == {"b", "c"}


def test_after_a_death_those_who_begin_anew_are_waited_for_and_it_is_a_failure() -> None:
    job = lone("a", "b", "c")
    leave(job.store, "c")
    assert "c is gone" in job.go()
    assert (job.head.forming, job.head.failures, job.head.fruitless) == (True, 1, 1)
    for name in ("a", "b"):
        leave(job.store, name)
        come(job, name)
        job.go()
    assert (job.head.generation, set(world_of(job.store))) == (3, {"a", "b"})
    assert (job.head.failures, job.head.fruitless) == (1, 1)


@pytest.mark.parametrize("action", [DRAIN, PREEMPT, PAUSE])
def test_who_was_asked_to_leave_is_not_waited_for(action: object) -> None:
    job = Job(0, least=1, most=3)
    for name in ("a", "b"):
        register(job.store, name, slots=1, reexecutes=True, **job.spec)
    job.go(settled=True)
    released(job.store, BEGIN_BARRIER)
    job.stop(action, *(("b",) if action is DRAIN else ()))  # type: ignore[arg-type]  # one of the three
    job.ends(0, 1)
    job.go()
    assert [one.worker for one in job.head.returning] == (["a"] if action is DRAIN else [])


def test_under_supervisors_nobody_is_waited_for() -> None:
    job = Job(2, least=1)
    released(job.store, BEGIN_BARRIER)
    job.join("w2")
    carry_out(job.store, job.epoch, settled=True)
    agreed(job.store, 20, Verdict.NO_TIME)
    job.go()
    assert (job.head.generation, job.head.members) == (2, 3)


def test_who_has_not_begun_adopts_the_next_world_and_does_not_leave() -> None:
    job = lone("a", "b", begun=False)
    come(job, "c")
    job.go(settled=True)
    assert (job.head.generation, job.head.members) == (2, 3)
