"""A control plane that is nothing but the catalog's decisions, and ranks' ports to it.

What it answers is what a replica answers: the decisions settle on the in-memory keyspace, the
commit follows by itself, and every change is pushed to every rank. It can be down, lose answers
after they took effect, and lose pushes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from strata.core import checkpoints as core
from strata.core.arrivals import payload_limit
from strata.core.checkpoint_chores import chores, decide_adopt
from strata.core.checkpoint_copies import decide_report_copy
from strata.core.checkpoint_damage import decide_report_damage
from strata.core.checkpoint_pins import decide_close_reader, decide_open
from strata.core.job import JobView
from strata.core.records import CheckpointRecord, CheckpointState
from strata.core.retention_plan import decide_set_retention, next_tombstone, retention
from strata.core.save_hold import SaveHold
from strata.core.txn import Decision
from strata.core.view import Entry
from strata.errors import BarrierTimeout, CheckpointNotFound, Unavailable
from strata.v1 import checkpoints_pb2 as pb
from strata.v1 import retention_pb2 as retention_pb
from strata.v1.worlds_pb2 import RestorePoint
from strata.wire import checkpoints as wire
from tests.unit.core.checkpoint_job import Job

LEASE = 7

Find = Callable[[JobView], Entry[CheckpointRecord] | None]


class Rounds:
    """The rounds of barriers: released when all have come, broken for all alike when one is late."""

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
        self.job = Job(**slots)
        self.lock = threading.RLock()
        self.observers: list[Callable[[pb.Checkpoint], None]] = []
        self.answers: list[type[Message]] = []
        self.rounds = Rounds()
        self.down = False
        self.pushes = True
        self.commits = True
        self.lose_answers = 0
        self.on_call: Callable[[Message], None] = lambda request: None

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

    def view(self) -> JobView:
        return self.job.store.job()

    def records(self) -> list[CheckpointRecord]:
        return [entry.record for entry in self.view().checkpoints()]

    def restore_point(self) -> RestorePoint | None:
        """Return where the next world begins, as its ranks are told."""
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

    def _answer(self, request: Message) -> Any:
        match request:
            case pb.BeginCheckpointRequest():
                begin = wire.begin_request(request)
                found = self._settle(
                    lambda job: core.decide_begin(job, begin, now_unix_ms=1),
                    lambda job: job.checkpoint(begin.step, begin.author.generation),
                )
                return pb.BeginCheckpointResponse(checkpoint=found)
            case pb.AckCheckpointRequest():
                ack = wire.ack_request(request)
                found = self._settle(
                    lambda job: core.decide_ack(job, ack),
                    lambda job: job.checkpoint(ack.step, ack.author.generation),
                )
                return pb.AckCheckpointResponse(checkpoint=found)
            case pb.SealCheckpointRequest():
                seal = wire.seal_request(request)
                found = self._settle(
                    lambda job: core.decide_seal(job, seal),
                    lambda job: job.checkpoint(seal.step, seal.author.generation),
                )
                return pb.SealCheckpointResponse(checkpoint=found)
            case pb.AbortCheckpointRequest():
                author = wire.author(request.author)
                found = self._settle(
                    lambda job: core.decide_abort(
                        job, author=author, step=request.step, attempt=request.attempt, reason=request.reason
                    ),
                    lambda job: job.checkpoint(request.step, author.generation),
                )
                return pb.AbortCheckpointResponse(checkpoint=found)
            case pb.DeleteCheckpointRequest():
                found = self._settle(
                    lambda job: core.decide_delete(
                        job,
                        step=request.step,
                        attempt=request.attempt,
                        finished=request.finished,
                        tier=request.tier,
                        host=request.host,
                    ),
                    lambda job: core.find(job, request.step, request.attempt),
                )
                return pb.DeleteCheckpointResponse(checkpoint=found)
            case pb.ReportCopyRequest():
                copy = wire.copy_request(request)
                found = self._settle(
                    lambda job: decide_report_copy(job, copy),
                    lambda job: core.find(job, request.step, request.attempt),
                )
                return pb.ReportCopyResponse(checkpoint=found)
            case pb.ListCheckpointsRequest():
                job = self.view()
                listed = [wire.checkpoint_message(job, entry) for entry in job.checkpoints()]
                return pb.ListCheckpointsResponse(checkpoints=listed)
            case pb.GetCheckpointRequest():
                return self._get(request)
            case _:
                return self._keep(request)

    def _keep(self, request: Message) -> Any:
        """Answer what concerns a checkpoint after its commit."""
        match request:
            case retention_pb.SetRetentionRequest():
                wanted = wire.retention_record(request.retention)
                who, seen = wire.retention_author(request), wire.if_revision(request)
                self._settle(
                    lambda job: decide_set_retention(job, wanted, author=who, if_revision=seen),
                    lambda job: None,
                )
                return retention_pb.SetRetentionResponse(retention=request.retention)
            case retention_pb.GetRetentionRequest():
                held = retention(self.view())
                return retention_pb.GetRetentionResponse(
                    retention=None if held is None else wire.retention_message(held.record),
                    revision=0 if held is None else held.mod_revision,
                )
            case pb.ListChoresRequest():
                self._mark()
                due = chores(self.view(), request.host)
                return pb.ListChoresResponse(chores=map(wire.chore_message, due))
            case pb.ReportDamageRequest():
                report = wire.damage_report(request)
                found = self._settle(
                    lambda job: decide_report_damage(job, report),
                    lambda job: core.find(job, request.step, request.attempt),
                )
                return pb.ReportDamageResponse(checkpoint=found)
            case pb.AdoptCheckpointRequest():
                adopt = wire.adopt_request(request)
                found = self._settle(
                    lambda job: decide_adopt(job, adopt),
                    lambda job: core.find(job, request.step, request.attempt),
                )
                return pb.AdoptCheckpointResponse(checkpoint=found)
            case pb.OpenCheckpointRequest():
                self.job.store.state.leased.setdefault(LEASE, set())
                found = self._settle(
                    lambda job: decide_open(
                        job,
                        step=request.step,
                        attempt=request.attempt,
                        reader=request.reader,
                        who=request.who,
                        lease=LEASE,
                    ),
                    lambda job: core.find(job, request.step, request.attempt),
                )
                return pb.OpenCheckpointResponse(checkpoint=found)
            case pb.CloseCheckpointRequest():
                self._settle(
                    lambda job: decide_close_reader(
                        job, step=request.step, attempt=request.attempt, reader=request.reader
                    ),
                    lambda job: None,
                )
                return pb.CloseCheckpointResponse()
        raise AssertionError(f"nobody answers {type(request).__name__}")

    def _mark(self) -> None:
        """Do what the leader does on each change."""
        while (decision := next_tombstone(self.view(), now_unix_ms=1)).txn is not None:
            assert self.job.store.execute(decision.txn).succeeded

    def _get(self, request: pb.GetCheckpointRequest) -> pb.GetCheckpointResponse:
        job = self.view()
        entry = core.newest(job) if request.latest else core.find(job, request.step, request.attempt)
        if request.before and entry is not None:
            entry = core.newest(job, before=core.counts(job, entry.record))
        if entry is None:
            raise CheckpointNotFound("none")
        return pb.GetCheckpointResponse(checkpoint=wire.checkpoint_with_doubts(job, entry))

    def _settle(self, decide: Callable[[JobView], Decision], find: Find) -> pb.Checkpoint | None:
        before = self.job.store.revision
        self.job.store.settle(decide)
        answer = self._message(find)
        if self.commits:
            self.job.commit()
        if self.pushes and self.job.store.revision != before:
            news = self._message(find)
            for observe in tuple(self.observers) if news is not None else ():
                assert news is not None
                observe(news)
        return answer

    def _message(self, find: Find) -> pb.Checkpoint | None:
        job = self.view()
        entry = find(job)
        return wire.checkpoint_message(job, entry) if entry is not None else None


@dataclass
class Port:
    """A `SessionPort` of one rank."""

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
    """What the rank said of saves that it holds."""

    @property
    def world_size(self) -> int:
        world = self.cluster.view().world()
        assert world is not None
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
