"""A store without time or tasks, and views of it, for the tests of this folder.

The store is etcd's data model (`strata.testing.mvcc`), so compares have etcd's meaning.
An `Observer` stands for a process with its own view, which may lag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from strata.core import invariants
from strata.core.checkpoints.attempt import Author
from strata.core.ids import BootId, InstanceId, ReplicaId, WorkerId
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys, JobKeys
from strata.core.kv.records import (
    BarrierFloor,
    BarrierOutcome,
    BarrierResult,
    JobSpec,
    Leader,
    Replica,
    Worker,
    b64,
    encode,
)
from strata.core.kv.txn import Decision, Delete, Operation, Put, Range, Txn, TxnResult, prefix_end
from strata.core.kv.view import View
from strata.core.members.membership import decide_leave, decide_register
from strata.core.members.registration import Registration
from strata.core.stop import requests
from strata.core.stop.last_step import STOP_BARRIER, Agreement, Verdict
from strata.core.worlds.planning import WorldPlan, plan_world
from strata.testing import txn_limits
from strata.testing.mvcc import State
from tests.not_none import not_none

KEYS = ClusterKeys("test")
JOB = KEYS.job("job")


class Store:
    """The keyspace, written by transactions only."""

    def __init__(self) -> None:
        self.state = State()
        self._live = View()

    @property
    def live(self) -> JobView:
        """The present state of the job. The next write changes it, so read it before that."""
        return JobView(self._live, JOB)

    @property
    def revision(self) -> int:
        return self.state.head

    def execute(self, txn: Txn) -> TxnResult:
        txn_limits.check(txn)
        result, written = self.state.apply(txn)
        if written is not None:
            self._live.apply(written.number, written.events)
        return result

    def put(self, key: str, record: Any) -> int:
        """Write a record directly; return the revision."""
        return self.execute(Txn(success=(Put(key=key, value=encode(record)),))).revision

    def delete(self, key: str) -> int:
        return self.execute(Txn(success=(Delete(key=key),))).revision

    def view(self, revision: int = 0) -> View:
        """Return the keyspace as of `revision`, or now."""
        whole = Range(key=KEYS.root, range_end=prefix_end(KEYS.root), revision=revision)
        view = View()
        view.reset(revision or self.revision, self.state.read(whole).kvs)
        return view

    def job(self, revision: int = 0) -> JobView:
        return JobView(self.view(revision), JOB)

    def settle(self, decide: Callable[[JobView], Decision]) -> Decision:
        """Decide and execute until nothing is left, as a replica's executor does."""
        decision = decide(self.live)
        for _ in range(20):
            if decision.txn is None:
                if decision.refusal is not None:
                    raise decision.refusal
                return decision
            assert self.execute(decision.txn).succeeded, decision.reason
            decision = decide(self.live)
        raise AssertionError(f"it does not recognise its own effect: {decision.reason}")

    def problems(self) -> list[str]:
        return invariants.check(self._live, KEYS)


class Observer:
    """A process that decides on its own view."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.view = store.view()

    @property
    def job(self) -> JobView:
        return JobView(self.view, JOB)

    def catch_up(self, revision: int | None = None) -> None:
        """Apply all writes up to `revision`, or every write."""
        until = self.store.revision if revision is None else revision
        if until <= self.view.revision:
            return
        history = self.store.state.history(self.view.revision + 1)
        for written in history:
            if written.number <= until:
                self.view.apply(written.number, written.events)
        self.view.apply(until, ())


# -- helpers to set up tests ------------------------------------------------------------------


def lead(store: Store, name: str = "r1") -> int:
    """Make `name` the leader, deposing the present one; return the epoch."""
    store.delete(KEYS.leader)
    record = Leader(instance=InstanceId(f"i-{name}"), replica=ReplicaId(name), address="")
    return store.put(KEYS.leader, record)


def serve(store: Store, name: str = "r1") -> InstanceId:
    """Register a replica; return its instance."""
    instance = InstanceId(f"i-{name}")
    store.put(KEYS.replica(name), Replica(instance=instance, address=f"{name}:1"))
    return instance


def registration(
    worker: str,
    *,
    boot: str | None = None,
    slots: int = 1,
    incarnation: int = 0,
    resume: bool = False,
    attempt: int = 0,
    cannot_restart: bool = False,
    **spec: Any,
) -> Registration:
    return Registration(
        worker=WorkerId(worker),
        boot=BootId(boot or f"boot-{worker}"),
        host=f"host-{worker}",
        slots=slots,
        pid=7,
        spec=JobSpec(**spec),
        incarnation=incarnation,
        resume=resume,
        attempt=attempt,
        cannot_restart=cannot_restart,
    )


def register(store: Store, worker: str, *, slots: int = 1, **spec: Any) -> int:
    """Register a freshly booted worker; return its incarnation."""
    boot = f"boot-{worker}-{store.revision}"
    new = registration(worker, boot=boot, slots=slots, **spec)
    store.settle(lambda job: decide_register(job, new, served_by=InstanceId("i-r1")))
    return not_none(store.live.worker(worker)).create_revision


def crowd(store: Store, count: int, *, name: str = "node-{:05d}", most: int | None = None) -> None:
    """Write the keys of many workers directly, which is quicker than registering each."""
    store.put(JOB.spec, JobSpec(min_workers=1, max_workers=most or count))
    for index in range(count):
        worker = Worker(boot=BootId("b"), served_by=InstanceId("i-r1"))
        store.put(JOB.worker(name.format(index)), worker)


def leave(store: Store, worker: str) -> None:
    held = not_none(store.live.worker(worker))
    store.settle(lambda job: decide_leave(job, WorkerId(worker), held.create_revision))


def release(
    job: JobKeys, barrier: str, generation: int = 1, *, round_: int = 1, brought: Mapping[int, bytes] = {}
) -> Txn:
    """Return a transaction that writes the keys of a barrier's release."""
    outcome = BarrierOutcome(
        generation=generation,
        round=round_,
        result=BarrierResult.RELEASED,
        digest="",
        reason="all arrived",
        payloads={str(rank): b64(data) for rank, data in brought.items()},
    )
    operations: list[Operation] = [
        Put(key=job.outcome(barrier, generation, round_), value=encode(outcome)),
        Put(key=job.barrier_floor(barrier, generation), value=encode(BarrierFloor(round=round_))),
    ]
    if round_ > 1:
        operations.append(Delete(key=job.outcome(barrier, generation, round_ - 1)))
    return Txn(success=tuple(operations))


def released(
    store: Store, barrier: str, generation: int = 1, *, round_: int = 1, brought: Mapping[int, bytes] = {}
) -> None:
    """Write the keys of the release of a barrier at which all ranks have met."""
    store.execute(release(JOB, barrier, generation, round_=round_, brought=brought))


def agreed(store: Store, step: int, verdict: Verdict = Verdict.SAVE, *, past: Collection[int] = ()) -> None:
    """Write the keys of the ranks' meetings that agree on a last step; the ranks in `past` had begun a later step."""
    head = not_none(store.live.head()).record
    proposals = {rank: Agreement(begun=step).propose() for rank in range(head.size)}
    answers = {
        rank: json.dumps([2, "a", 0, step, int(rank not in past), verdict]).encode() for rank in proposals
    }
    released(store, STOP_BARRIER, head.generation, round_=1, brought=proposals)
    released(store, STOP_BARRIER, head.generation, round_=2, brought=answers)


def plan(store: Store, epoch: int, *, settled: bool = False, request_ages_s: float = 0.0) -> WorldPlan:
    """Plan as a leader that has seen every request to leave for `request_ages_s` seconds."""
    known = dict.fromkeys(requests.revisions(store.live), request_ages_s)
    return plan_world(
        store.live,
        keys=KEYS,
        epoch=epoch,
        settled=settled,
        request_ages_s=known,
        now_unix_ms=store.revision * 1000,
    )


def carry_out(store: Store, epoch: int, *, settled: bool = False, request_ages_s: float = 0.0) -> str:
    """Plan and execute until nothing is left to do; return the first reason."""
    reasons = []
    for _ in range(50):
        planned = plan(store, epoch, settled=settled, request_ages_s=request_ages_s)
        reasons.append(planned.reason)
        if not planned.txns:
            return reasons[0]
        for txn in planned.txns:
            assert store.execute(txn).succeeded, planned.reason
    raise AssertionError(f"the plans do not end: {reasons[-3:]}")


def author_of(job: JobView, rank: int) -> Author:
    """Return the author of a request by `rank` of the current world."""
    world = not_none(job.world())
    member = world.member_of(rank)
    return Author(
        worker=member.worker, incarnation=member.incarnation, generation=world.head.generation, rank=rank
    )


def world_of(store: Store) -> dict[str, tuple[int, int]]:
    """Return (group rank, first rank) by worker."""
    return {m.worker: (m.group_rank, m.first_rank) for m in not_none(store.live.world()).members}
