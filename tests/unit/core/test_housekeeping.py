from __future__ import annotations

from collections.abc import Callable

import pytest

from strata.core.housekeeping import (
    KEPT_GENERATIONS,
    MAX_OPS,
    orphans,
    plan_ended_generations,
    plan_orphans,
)
from strata.core.ids import InstanceId, WorkerId
from strata.core.kv.records import (
    BarrierFloor,
    CheckpointState,
    JobSpec,
    RankStopped,
    Replica,
    StopAction,
    StopNotice,
    WorldHead,
)
from strata.core.kv.txn import Plan
from strata.core.members.membership import decide_register
from strata.core.stop.requests import StopRequest, decide_stop
from tests.not_none import not_none
from tests.unit.core.rig import (
    JOB,
    KEYS,
    Observer,
    Store,
    carry_out,
    crowd,
    lead,
    leave,
    register,
    registration,
    released,
    serve,
)
from tests.unit.core.worlds.test_planning import checkpoint, commit


@pytest.fixture
def aged() -> Aged:
    return Aged()


@pytest.fixture
def served() -> Served:
    return Served()


# -- ended generations ------------------------------------------------------------------------


class Aged:
    """A job that has been through generations, each with a barrier."""

    def __init__(self) -> None:
        self.store = Store()
        self.epoch = lead(self.store)
        for name in ("w0", "w1"):
            register(self.store, name, max_workers=2, max_no_progress_generations=100)
        carry_out(self.store, self.epoch)

    def next_generation(self) -> None:
        leave(self.store, "w0")
        register(self.store, "w0", max_workers=2, max_no_progress_generations=100)
        carry_out(self.store, self.epoch)

    def plan(self) -> Plan:
        return plan_ended_generations(self.store.job(), keys=KEYS, epoch=self.epoch)

    def clean(self) -> Plan:
        plan = self.plan()
        for txn in plan.txns:
            assert len(txn.success) <= MAX_OPS
            assert self.store.execute(txn).succeeded
        assert self.store.problems() == []
        return plan


def test_all_generations_are_cleared_away_but_the_newest(aged: Aged) -> None:
    released(aged.store, "b")
    released(aged.store, "c")
    for _ in range(KEPT_GENERATIONS - 1):
        aged.next_generation()
    newest = KEPT_GENERATIONS
    released(aged.store, "b", newest)
    assert aged.clean().txns == (), "somebody may still ask how a barrier of generation 1 ended"
    aged.next_generation()
    assert "generations 1 are" in aged.clean().reason
    view = aged.store.view()
    assert view.names(JOB.worlds) == [f"{generation:012}" for generation in range(2, newest + 2)]
    assert view.names(JOB.barriers) == ["b"]
    assert view.names(JOB.barrier_name("b")) == [f"{newest:012}"]
    assert aged.plan().txns == ()


def test_a_repeated_stop_request_stays_fulfilled_after_two_more_worlds(aged: Aged) -> None:
    request = StopRequest(action=StopAction.PREEMPT, reason="maintenance", generation=1)
    aged.store.settle(lambda job: decide_stop(job, request))
    for _ in range(2):
        aged.next_generation()
        aged.clean()
    again = decide_stop(aged.store.job(), request)
    assert (again.txn, again.refusal) == (None, None)


def test_a_generations_restore_point_stays_while_it_supersedes_a_record(aged: Aged) -> None:
    commit(aged.store, 20)
    aged.next_generation()
    assert aged.store.job().restored(2) == 20
    checkpoint(
        aged.store, 40, generation=1, state=CheckpointState.COMMITTED
    )  # a save of generation 1 after the restored step; it is still in storage
    aged.next_generation()
    aged.store.put(JOB.notice(2), StopNotice(action=StopAction.PREEMPT, reason=""))
    aged.store.put(JOB.stopped_rank(2, 0), RankStopped(worker=WorkerId("w0")))
    for _ in range(KEPT_GENERATIONS):
        aged.next_generation()
    aged.clean()
    assert aged.store.job().restored(2) == 20
    assert aged.store.view().names(JOB.generation(2)) == ["restored"]
    assert aged.plan().txns == ()
    aged.store.delete(JOB.checkpoint(40, 1))
    aged.clean()
    assert aged.store.job().restored(2) is None


def test_many_generations_are_cleared_in_batches(aged: Aged) -> None:
    for generation in range(2, 150):
        aged.store.put(JOB.barrier_floor("b", generation), BarrierFloor(round=1))
    head = WorldHead(generation=151, epoch=aged.epoch, members=0, size=0, reason="")
    aged.store.put(JOB.head, head)
    plan = aged.plan()
    assert len(plan.txns) == 4
    for txn in plan.txns:
        assert aged.store.execute(txn).succeeded
    assert aged.plan().txns == ()


def test_clearing_away_is_fenced(aged: Aged) -> None:
    for _ in range(KEPT_GENERATIONS):
        aged.next_generation()
    plan = aged.plan()
    lead(aged.store, "r2")
    assert not aged.store.execute(plan.txns[0]).succeeded


def test_a_job_without_a_world_has_nothing_to_clear(store: Store) -> None:
    store.put(JOB.spec, JobSpec())
    assert plan_ended_generations(store.job(), keys=KEYS, epoch=1).txns == ()


# -- orphans ----------------------------------------------------------------------------------


class Served:
    """Two replicas, and a member served by each."""

    def __init__(self) -> None:
        self.store = Store()
        self.epoch = lead(self.store)
        self.instances = [serve(self.store, name) for name in ("r1", "r2")]
        for index, instance in enumerate(self.instances):
            self.serve(f"w{index}", instance)

    def serve(self, worker: str, instance: InstanceId) -> None:
        new = registration(worker, max_workers=2)
        self.store.settle(lambda job: decide_register(job, new, served_by=instance))

    def plan(self, *, seen_ms: float = 0, calm_ms: float = 0, now_ms: float = 5000) -> Plan:
        job = self.store.job()
        return plan_orphans(
            job,
            keys=KEYS,
            epoch=self.epoch,
            orphaned_since_ms=dict.fromkeys(orphans(job, keys=KEYS), seen_ms),
            calm_since_ms=calm_ms,
            now_ms=now_ms,
        )


def test_a_member_of_a_live_replica_is_no_orphan(served: Served) -> None:
    assert orphans(served.store.job(), keys=KEYS) == {}
    assert served.plan(now_ms=1e9).txns == ()


def test_an_orphan_is_deleted_five_seconds_after_the_latest_of_all_reasons(served: Served) -> None:
    served.store.delete(KEYS.replica("r2"))
    assert served.plan(now_ms=4999).txns == ()
    assert served.plan(seen_ms=100, now_ms=5099).txns == ()
    assert served.plan(calm_ms=100, now_ms=5099).txns == ()
    unseen = plan_orphans(
        served.store.job(),
        keys=KEYS,
        epoch=served.epoch,
        orphaned_since_ms={},
        calm_since_ms=0,
        now_ms=1e9,
    )
    assert unseen.txns == ()
    plan = served.plan()
    assert "w1: no replica has served them for 5 s" in plan.reason
    assert served.store.execute(plan.txns[0]).succeeded
    assert [worker.name for worker in served.store.job().workers()] == ["w0"]


def test_a_member_of_a_replica_that_returns_as_another_instance_is_an_orphan(served: Served) -> None:
    served.store.delete(KEYS.replica("r2"))
    again = Replica(instance=InstanceId("i-r2-again"), address="r2:1")
    served.store.put(KEYS.replica("r2"), again)
    assert len(orphans(served.store.job(), keys=KEYS)) == 1


@pytest.mark.parametrize(
    "meanwhile",
    [
        lambda served: served.serve("w1", served.instances[0]),
        lambda served: serve(served.store, "r2"),
        lambda served: lead(served.store, "r2"),
    ],
    ids=["the member comes back", "its replica comes back", "another leader"],
)
def test_a_change_before_the_deletion_spares_an_orphan(
    served: Served, meanwhile: Callable[[Served], object]
) -> None:
    served.store.delete(KEYS.replica("r2"))
    plan = served.plan()
    meanwhile(served)
    assert not served.store.execute(plan.txns[0]).succeeded


def test_an_orphan_reconnecting_at_the_leader_is_not_deleted(served: Served) -> None:
    served.store.delete(KEYS.replica("r1"))
    served.store.delete(KEYS.replica("r2"))
    job = served.store.job()
    since = dict.fromkeys(orphans(job, keys=KEYS), 0.0)
    plan = plan_orphans(
        job,
        keys=KEYS,
        epoch=served.epoch,
        orphaned_since_ms=since,
        calm_since_ms=0,
        now_ms=5000,
        arriving={"w1"},
    )
    assert "w1" not in plan.reason
    for txn in plan.txns:
        assert served.store.execute(txn).succeeded
    assert "w1" in [worker.name for worker in served.store.job().workers()]


def test_a_handover_to_another_dead_replica_restarts_the_orphan_timeout(served: Served) -> None:
    served.store.delete(KEYS.replica("r2"))
    before = set(orphans(served.store.job(), keys=KEYS))
    served.serve("w1", InstanceId("i-dead"))
    assert before.isdisjoint(orphans(served.store.job(), keys=KEYS))


def test_many_orphans_go_in_batches_that_fail_alone(store: Store) -> None:
    lead(store)
    crowd(store, 100)
    assert orphans(store.job(), keys=KEYS) == {}, "who leads is there, with or without its replica key"
    epoch = lead(store, "r2")
    job = store.job()
    found = orphans(job, keys=KEYS)
    assert len(found) == 100
    plan = plan_orphans(
        job,
        keys=KEYS,
        epoch=epoch,
        orphaned_since_ms=dict.fromkeys(found, 0.0),
        calm_since_ms=0,
        now_ms=5000,
    )
    assert len(plan.txns) == 4
    lagging = Observer(store)
    returning = registration("node-00000", boot="b", max_workers=100)
    decision = decide_register(lagging.job, returning, served_by=InstanceId("i-r2"))
    assert store.execute(not_none(decision.txn)).succeeded
    assert [store.execute(txn).succeeded for txn in plan.txns] == [False, True, True, True]
