"""A fake control plane, which answers only the catalog's rows of the request table, and the ranks' ports to it.

It answers as a replica does: a request's transactions run on an in-memory keyspace, the commit follows by itself, and
every change is pushed to every rank. The fake can be down, lose pushes, and lose the answer to a request that took
effect.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import Message

from strata.coordinator.calls.checkpoints import catalog
from strata.coordinator.calls.retention import retention
from strata.coordinator.measures import Measures
from strata.coordinator.reports.save_times import SaveTimes
from strata.core.barriers.arrivals import payload_limit
from strata.core.checkpoints import lifecycle as core
from strata.core.checkpoints.retention_plan import next_tombstone
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState
from strata.core.kv.txn import Decision
from strata.core.kv.view import View
from strata.core.stop.save_hold import SaveHold
from strata.errors import BarrierTimeout, Unavailable
from strata.v1 import checkpoints_pb2 as pb
from strata.v1.worlds_pb2 import RestorePoint
from strata.wire import checkpoints as wire
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import Job
from tests.unit.core.rig import KEYS, Store

LEASE = 7


class Rounds:
    """The rounds of barriers.

    A round is released when all ranks have arrived, and broken for all ranks if one rank is late.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.arrived: dict[tuple[str, int, int], dict[int, bytes]] = {}
        self.broken: set[tuple[str, int, int]] = set()
        self.released: dict[tuple[str, int], int] = {}
        self.messages: list[bytes] = []

    def floor(self, key: tuple[str, int]) -> int:
        with self.changed:
            return self.released.get(key, 0)

    def meet(
        self, key: tuple[str, int, int], rank: int, payload: bytes, *, size: int, timeout_s: float | None
    ) -> dict[int, bytes]:
        assert len(payload) <= payload_limit(size)
        with self.changed:
            here = self.arrived.setdefault(key, {})
            if key not in self.broken:
                here[rank] = payload
                self.messages.append(payload)
            if len(here) == size:
                self.released[key[:2]] = key[2]
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: len(here) == size or key in self.broken, timeout_s):
                self.broken.add(key)
                self.changed.notify_all()
            if len(here) < size:
                late = sorted(set(range(size)) - here.keys())
                raise BarrierTimeout(f"{key[0]}: ranks {late} are late", missing=map(str, late))
            return {each: data for each, data in here.items() if data}


class Cluster:
    """A job in its world; `port(rank)` is one rank's session."""

    def __init__(self, **slots: int) -> None:
        self.lock = threading.RLock()
        self.take(Job(**slots))
        self.observers: list[Callable[[pb.Checkpoint], None]] = []
        self.answers: list[type[Message]] = []
        self.rounds = Rounds()
        self.down = False
        self.pushes = True
        self.commits = True
        self.lose_answers = 0
        self.on_call: Callable[[Message], None] = lambda request: None

    def take(self, job: Job) -> None:
        """From now on answer from this job's keys."""
        self.job = job
        rows: Any = _Replica(job.store)
        self.measures: Measures = rows.measures
        self._rows = {
            f"{row.method.partition('.')[2]}Request": row.answer for row in (*catalog(rows), *retention(rows))
        }

    def port(self, rank: int, *, restore: RestorePoint | None = None) -> Port:
        author = self.job.author(rank)
        return Port(
            cluster=self,
            worker_id=author.worker,
            incarnation=author.incarnation,
            generation=author.generation,
            rank=rank,
            restore_point=restore,
        )

    def copy(self) -> Cluster:
        """Return a control plane with a copy of the present keys: a snapshot."""
        made = Cluster(a=1)
        made.take(copy.deepcopy(self.job))
        return made

    def view(self) -> JobView:
        with self.lock:
            return self.job.store.job()

    def records(self) -> list[CheckpointRecord]:
        return [entry.record for entry in self.view().checkpoints()]

    def restore_point(self) -> RestorePoint | None:
        """Return the restore point of the next world, as its ranks receive it."""
        entry = core.newest(self.view())
        if entry is None:
            return None
        return RestorePoint(
            step=entry.record.step,
            attempt=entry.record.attempt,
            record_generation=entry.record.generation,
            path=entry.record.path,
            manifest_digest=entry.record.manifest_digest,
        )

    def next_world(self) -> None:
        with self.lock:
            self.job.next_world()

    # -- answering

    def call(self, request: Message) -> Any:
        self.on_call(request)
        with self.lock:
            if self.down:
                raise Unavailable("nobody is there")
            answer = self._answer(request)
            self.answers.append(type(request))
            if self.lose_answers:
                self.lose_answers -= 1
                raise Unavailable("the answer was lost")
            return answer

    def _answer(self, request: Any) -> Any:
        if isinstance(request, pb.ListMaintenanceRequest):
            self._mark()
        before = self.job.store.revision
        request.job = "job"
        answer = _done(self._rows[type(request).__name__](request, None))
        if self.commits:
            self.job.commit()
        if self.pushes and self.job.store.revision != before:
            job, named = self.view(), getattr(request, "attempt", "")
            for entry in job.checkpoints():
                if entry.mod_revision > before or entry.record.attempt == named:  # or a key below it
                    for observe in tuple(self.observers):
                        observe(wire.checkpoint_message(job, entry))
        return answer

    def _mark(self) -> None:
        """Write tombstones, as the leader does on each change."""
        while (decision := next_tombstone(self.view(), now_unix_ms=1)).txn is not None:
            assert self.job.store.execute(decision.txn).succeeded


class _Replica:
    """The parts of a replica that the rows need: a view that is never behind, an executor, and leases."""

    keys = KEYS

    def __init__(self, store: Store) -> None:
        self._store = store
        self.mirror = self.executor = self.store = self
        self.measures = Measures()
        self.save_times = SaveTimes(
            self.view, KEYS, self.measures, clock=lambda: 0.0, committed=lambda _job, _seconds: None
        )

    @property
    def view(self) -> View:
        return self._store.live.view

    def job(self, name: str) -> JobView:
        return JobView(self.view, self.keys.job(name))

    def unix_now(self) -> float:
        return 0.001

    async def fresh(self) -> None:
        """Return at once: this view is never behind."""

    async def settle(self, decide: Callable[[View], Decision], **_: object) -> None:
        self._store.settle(lambda job: decide(job.view))

    async def grant(self, ttl_s: int) -> Any:
        self._store.state.leased.setdefault(LEASE, set())
        return SimpleNamespace(id=LEASE)

    async def keep_alive(self, lease: int) -> None:
        """Do nothing: leases here never expire."""

    revoke = keep_alive


def _done(answer: Any) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        answer.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits for something")


@dataclass
class Port:
    """One rank's fake session."""

    cluster: Cluster
    worker_id: str
    incarnation: int
    generation: int
    rank: int
    restore_point: RestorePoint | None = None
    job: str = "job"
    uid: str = "uid-1"
    timeouts: list[float] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    holds: list[SaveHold | None] = field(default_factory=list)
    """The rank's reports of held saves, in order."""

    @property
    def world_size(self) -> int:
        world = not_none(self.cluster.view().world())
        return world.head.size

    def call(self, request: Message, *, timeout_s: float = 30.0) -> Any:
        self.timeouts.append(timeout_s)
        return self.cluster.call(request)

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        key = name, self.generation
        here = self.last[name] = max(self.last.get(name, 0), self.cluster.rounds.floor(key)) + 1
        return self.cluster.rounds.meet(
            (*key, here), self.rank, payload or b"", size=self.world_size, timeout_s=timeout_s
        )

    def hold_saves(self, hold: SaveHold | None) -> None:
        self.holds.append(hold)

    def observe_checkpoints(self, callback: Callable[[pb.Checkpoint], None]) -> Callable[[], None]:
        self.cluster.observers.append(callback)
        return lambda: self.cluster.observers.remove(callback)


def state_of(cluster: Cluster, step: int) -> CheckpointState:
    (state,) = (record.state for record in cluster.records() if record.step == step)
    return state
