from __future__ import annotations

from collections.abc import Callable

import pytest

from strata.core.datasets.assignment import (
    MAX_SHARDS,
    decide_register_dataset,
    divided,
    owners_of,
    plan_assignment,
    seated,
    shards_of,
)
from strata.core.datasets.ring import owners
from strata.core.ids import WorkerId
from strata.core.kv.records import Assignment, DatasetSpec, JobPhase, Phase
from strata.errors import Conflict, InvalidArgument
from tests.not_none import not_none
from tests.unit.core.rig import JOB, KEYS, Store, carry_out, crowd, lead, leave, register


class Divided:
    """A world of three of at most four members, and a leader."""

    def __init__(self) -> None:
        self.store = Store()
        self.epoch = lead(self.store)
        for name in ("w0", "w1", "w2"):
            register(self.store, name, max_workers=4)
        carry_out(self.store, self.epoch, settled=True)

    def register(self, name: str = "d", shards: int = 100) -> None:
        spec = DatasetSpec(shards=shards, uri="file:///data/{shard}")
        self.store.settle(lambda job: decide_register_dataset(job, name, spec))

    def go(self) -> str:
        plan = plan_assignment(self.store.job(), keys=KEYS, epoch=self.epoch)
        for txn in plan.txns:
            assert self.store.execute(txn).succeeded
        again = plan_assignment(self.store.job(), keys=KEYS, epoch=self.epoch)
        assert again.txns == ()
        assert self.store.problems() == []
        return plan.reason

    def assignment(self, name: str = "d") -> Assignment:
        return not_none(self.store.job().view.record(JOB.assignment(name), Assignment))


# -- registration -----------------------------------------------------------------------------


@pytest.fixture
def job() -> Divided:
    return Divided()


def test_a_dataset_registration_can_be_repeated_but_not_changed(store: Store) -> None:
    spec = DatasetSpec(shards=3, uri="s3://b/{shard}", metadata={"kind": "text"})
    store.settle(lambda job: decide_register_dataset(job, "d", spec))
    before = store.revision
    assert "is registered" in store.settle(lambda job: decide_register_dataset(job, "d", spec)).reason
    assert store.revision == before
    with pytest.raises(Conflict, match="another spec"):
        store.settle(lambda job: decide_register_dataset(job, "d", DatasetSpec(shards=4)))


def test_one_of_two_concurrent_registrations_of_a_dataset_fails(store: Store) -> None:
    view = store.job()
    one = decide_register_dataset(view, "d", DatasetSpec(shards=3))
    other = decide_register_dataset(view, "d", DatasetSpec(shards=4))
    assert one.txn is not None
    assert other.txn is not None
    assert store.execute(one.txn).succeeded
    assert not store.execute(other.txn).succeeded


@pytest.mark.parametrize(("name", "shards"), [("d", 0), ("d", MAX_SHARDS + 1), ("a/b", 1)])
def test_nonsense_is_refused(store: Store, name: str, shards: int) -> None:
    with pytest.raises(InvalidArgument):
        store.settle(lambda job: decide_register_dataset(job, name, DatasetSpec(shards=shards)))


# -- assignment -------------------------------------------------------------------------------


def test_every_dataset_is_divided_among_the_world(job: Divided) -> None:
    assert "are assigned" in job.go()
    job.register("d", 100)
    job.register("e", 7)
    assert job.go() == "d is divided among 3 members; e is divided among 3 members"
    found = job.assignment()
    assert (found.assign_epoch, found.generation, found.shards) == (1, 1, 100)
    assert found.epoch == job.epoch
    assert found.workers == ("w0", "w1", "w2")
    assert found.ring == "ring-v1"
    by_worker = shards_of(found)
    assert sorted(shard for taken in by_worker.values() for shard in taken) == list(range(100))
    assert owners_of(found) == owners(found.workers, 100, found.moved)
    assert all(owners_of(found)[shard] == w for w, taken in by_worker.items() for shard in taken)


def test_a_departing_member_hands_over_its_shards_and_no_other_shard_moves(job: Divided) -> None:
    job.register()
    job.go()
    before = job.assignment()
    leave(job.store, "w1")
    job.go()
    assert job.assignment() == before, "the world is what counts"
    carry_out(job.store, job.epoch)
    job.go()
    after = job.assignment()
    assert (after.assign_epoch, after.generation, after.workers) == (2, 2, ("w0", "w2"))
    for old, new in zip(owners_of(before), owners_of(after), strict=True):
        assert old in {new, "w1"}


def test_a_replacement_takes_over_its_predecessor_s_shards_and_no_other_moves(job: Divided) -> None:
    job.register()
    job.go()
    before = job.assignment()
    leave(job.store, "w1")
    register(job.store, "x", max_workers=4)
    carry_out(job.store, job.epoch)
    job.go()
    after = job.assignment()
    assert (after.workers, after.seats) == (("w0", "w2", "x"), {"x": "w1"})
    assert owners_of(after) == ["x" if owner == "w1" else owner for owner in owners_of(before)]
    assert {name.replace("x", "w1"): taken for name, taken in after.moved.items()} == before.moved


@pytest.mark.parametrize(
    ("workers", "before", "seats"),
    [
        ("ab", {}, {"a": "a", "b": "b"}),
        ("ab", {"a": "a", "b": "b"}, {"a": "a", "b": "b"}),
        ("ac", {"a": "a", "b": "b"}, {"a": "a", "c": "b"}),
        ("acd", {"a": "a", "b": "b"}, {"a": "a", "c": "b", "d": "d"}),
        ("bc", {"a": "a", "c": "b"}, {"b": "a", "c": "b"}),
        ("abc", {"a": "a", "c": "b"}, {"a": "a", "c": "b", "b": "b/2"}),
        ("abcd", {"a": "b/2", "c": "b", "d": "a"}, {"a": "b/2", "c": "b", "d": "a", "b": "b/3"}),
        ("bd", {"a": "d", "c": "b"}, {"b": "b", "d": "d"}),
        ("ef", {"a": "a", "b": "f", "c": "c"}, {"f": "f", "e": "a"}),
        ("a", {"b": "x", "c": "y"}, {"a": "x"}),
    ],
)
def test_ring_names_are_kept_taken_over_or_created(
    workers: str, before: dict[str, str], seats: dict[str, str]
) -> None:
    assert seated(list(workers), before) == seats
    assert seated(list(reversed(workers)), before) == seats


def test_over_many_replacements_only_the_share_of_the_replaced_moves() -> None:
    shards, workers = 2000, [f"w{index:02d}" for index in range(20)]
    assignment = divided(tuple(map(WorkerId, workers)), shards, None, epoch=1, generation=1)
    fresh = sum(map(len, assignment.moved.values()))
    for turn in range(60):
        workers[turn * 7 % 20] = f"x{turn:02d}"
        before = owners_of(assignment)
        assignment = divided(
            tuple(sorted(map(WorkerId, workers))), shards, assignment, epoch=1, generation=turn
        )
        departed = set(before) - set(workers)
        assert all(
            old == new or old in departed for old, new in zip(before, owners_of(assignment), strict=True)
        )
    assert sum(map(len, assignment.moved.values())) == fresh
    assert len(set(assignment.seats.values())) == 20


def test_a_new_generation_of_the_same_members_moves_nothing(job: Divided) -> None:
    job.register()
    job.go()
    leave(job.store, "w1")
    register(job.store, "w1", max_workers=4)
    carry_out(job.store, job.epoch)
    assert "are assigned" in job.go()
    assert job.assignment().assign_epoch == 1


def test_a_worker_may_own_nothing(job: Divided) -> None:
    job.register(shards=2)
    job.go()
    assert sorted(map(len, shards_of(job.assignment()).values())) == [0, 1, 1]


def test_after_the_end_and_without_a_world_nothing_is_assigned(job: Divided) -> None:
    job.register()
    job.store.put(JOB.phase, JobPhase(phase=Phase.FAILED, reason=""))
    assert "no world" in job.go()
    job.store.delete(JOB.phase)
    for name in ("w0", "w1", "w2"):
        leave(job.store, name)
    carry_out(job.store, job.epoch)
    assert "no world" in job.go()
    assert plan_assignment(Store().job(), keys=KEYS, epoch=5).txns == ()


def world_moves_on(job: Divided) -> None:
    leave(job.store, "w0")
    carry_out(job.store, job.epoch)


@pytest.mark.parametrize(
    ("change", "succeeds"),
    [
        (lambda job: None, True),
        (lambda job: lead(job.store, "r2"), False),
        (world_moves_on, False),
        (lambda job: job.store.put(JOB.dataset_spec("d"), DatasetSpec(shards=100)), False),
        (lambda job: job.store.delete(JOB.assignment("d")), False),
        (lambda job: job.store.put(JOB.phase, JobPhase(phase=Phase.DONE, reason="")), False),
    ],
)
def test_a_concurrent_change_makes_the_assignment_fail(
    job: Divided, change: Callable[[Divided], object], succeeds: bool
) -> None:
    job.register()
    job.go()
    leave(job.store, "w1")
    carry_out(job.store, job.epoch)
    (txn,) = plan_assignment(job.store.job(), keys=KEYS, epoch=job.epoch).txns
    change(job)
    assert job.store.execute(txn).succeeded is succeeds


def test_names_too_large_for_a_record_are_reported_and_not_raised(store: Store, epoch: int) -> None:
    crowd(store, 600, name="{:05d}" + "x" * 120)
    carry_out(store, epoch)
    spec = DatasetSpec(shards=10)
    store.settle(lambda job: decide_register_dataset(job, "d", spec))
    plan = plan_assignment(store.job(), keys=KEYS, epoch=epoch)
    assert plan.txns == ()
    assert "d cannot be assigned" in plan.reason
