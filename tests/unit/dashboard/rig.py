"""A replica for tests of the dashboard: a real view, board and barrier book, filled by hand."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from strata.config import CoordinatorConfig
from strata.coordinator.access.connection_limiter import ConnectionReport
from strata.coordinator.etcd.members import EtcdMember
from strata.coordinator.measures import Measures
from strata.coordinator.reports.charts import Charts
from strata.coordinator.reports.progress import ProgressBoard
from strata.coordinator.reports.save_times import SaveTimes
from strata.coordinator.status.diagnosis import diagnose_job
from strata.coordinator.status.event_log import EventLog, LoggedEvent
from strata.coordinator.status.job_phases import JobPhases
from strata.coordinator.status.live_state import LiveState
from strata.coordinator.status.observed import ReplicaState
from strata.core.access.authority import Identity
from strata.core.barriers.arrivals import Arrival, BarrierBook
from strata.core.health.findings import Diagnosis
from strata.core.ids import AttemptId, BootId, InstanceId, ReplicaId, Uid, WorkerId
from strata.core.job import JobView, World
from strata.core.kv import records
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    JobSpec,
    Member,
    MembersChunk,
    Worker,
    WorldHead,
    encode,
)
from strata.core.kv.txn import Event, KeyValue, WatchBatch
from strata.core.kv.view import Entry, View
from strata.core.leadership.leader import leader_of
from strata.dashboard.authorizer import HttpAuthorizer
from strata.errors import StrataError
from strata.v1.members_pb2 import RankProgress

KEYS = ClusterKeys("default")
EPOCH = 3


def anybody() -> HttpAuthorizer:
    """Return the authorizer of a coordinator without authentication."""
    return HttpAuthorizer(CoordinatorConfig(), now=lambda: dt.datetime.now(dt.UTC))


class Shown:
    """A `Source` with the state that a replica keeps in memory."""

    def __init__(self) -> None:
        self.replica, self.instance = ReplicaId("r1"), InstanceId("instance-1")
        self.version, self.uid = "1.2.3", Uid("uid")
        self.view, self.keys, self.measures = View(), KEYS, Measures()
        self.connections = ConnectionReport()
        self.event_log = EventLog(self.view, KEYS, self.measures, lambda: 1.7e9)
        self.unix_s: Callable[[], float] = lambda: 1.7e9
        self.refuses: StrataError | None = None
        self.etcd_requests = 0
        self.looked: list[tuple[str, int | None]] = []
        self.charts = Charts(self.view, KEYS, unix_now=lambda: self.unix_s())  # noqa: PLW0108
        self.clock_s = 0.0
        self.save_times = SaveTimes(
            self.view, KEYS, self.measures, clock=lambda: self.clock_s, committed=self.charts.committed
        )
        self.ages: dict[str, Sequence[tuple[str, float]]] = {}
        self.phases = JobPhases(self.view, KEYS)
        self.board, self.book = ProgressBoard(), BarrierBook()
        self.etcd: Sequence[EtcdMember] = (
            EtcdMember(endpoint="e1:2379", version="3.5.30", healthy=True, leader=True, db_size_bytes=4096),
        )
        self.ready: tuple[bool, str] = (True, "")
        self.calls: list[tuple[str, Any, Identity | None]] = []
        self.unwritable = ""
        self.impossible: dict[str, Sequence[str]] = {}

    @property
    def soft(self) -> LiveState:
        return LiveState(
            session_count=lambda: 7,
            ready_peers=tuple,
            open_rounds=self.book.open,
            progress=self.board.ranks,
            reported=self.board.reported,
            devices=self.board.devices,
            look=lambda job, rank: self.looked.append((job, rank)),
            last_seen=self.board.last_seen,
            member_ages=lambda job: iter(self.ages.get(job, ())),
            evidence=self.board.evidence,
            violations=lambda job: self.impossible.get(job, ()),
        )

    # -- filling it

    def put(self, key: str, record: Any) -> None:
        """Write a record, as an event of the watch does."""
        old = self.view.get(key)
        revision = self.view.revision + 1
        kv = KeyValue(
            key=key,
            value=record if isinstance(record, bytes) else encode(record),
            create_revision=old.create_revision if old is not None else revision,
            mod_revision=revision,
            version=1,
        )
        batch = WatchBatch(revision=revision, events=(Event(kv=kv),))
        self._take(batch)

    def _take(self, batch: WatchBatch) -> None:
        self.view.apply(batch.revision, batch.events)
        self.event_log.take(batch)
        self.save_times.take(batch)

    def remove(self, key: str) -> None:
        """Delete a key, as an event of the watch does."""
        revision = self.view.revision + 1
        deleted = KeyValue(key=key, value=b"", create_revision=0, mod_revision=revision, version=0)
        self._take(WatchBatch(revision=revision, events=(Event(kv=deleted, deleted=True),)))

    def sample(self) -> None:
        """Record one second of the charts."""
        self.charts.sample(self.board, asyncio.get_running_loop().time())

    def world(self, name: str) -> World:
        found = JobView(self.view, KEYS.job(name)).world()
        assert found is not None
        return found

    def lead(self) -> None:
        """Register this replica and make it the leader."""
        self.put(
            KEYS.replica(self.replica),
            records.Replica(instance=self.instance, address="h1:50051", http_address="h1:8080"),
        )
        self.put(
            KEYS.leader, records.Leader(instance=self.instance, replica=self.replica, address="h1:50051")
        )

    def job(self, name: str, *, members: int, slots: int = 1, host: str = "host") -> None:
        """Begin generation 1 of a job, in which every member takes part."""
        keys = KEYS.job(name)
        self.put(keys.spec, JobSpec(min_workers=members, max_workers=members))
        places = []
        for number in range(members):
            worker = WorkerId(f"w{number}")
            self.put(
                keys.worker(worker),
                Worker(boot=BootId("b"), served_by=self.instance, host=host, slots=slots, pid=100 + number),
            )
            places.append(
                Member(
                    worker=worker,
                    incarnation=self.view.revision,
                    group_rank=number,
                    slots=slots,
                    first_rank=number * slots,
                )
            )
        for index, start in enumerate(range(0, members, 100)):
            chunk = MembersChunk(members=tuple(places[start : start + 100]))
            self.put(keys.members_chunk(1, EPOCH, index), chunk)
        head = WorldHead(
            generation=1, epoch=EPOCH, members=members, size=members * slots, reason="all are here", chunks=1
        )
        self.put(keys.head, head)

    def say(self, name: str, rank: int, step: int, phase: str) -> None:
        """Report the step and phase of a rank of generation 1."""
        report = RankProgress(rank=rank, step=step, phase=phase, age_ms=200)
        self.board.note(name, 1, [report], own=True)

    def arrive(self, name: str, barrier: str, ranks: Iterable[int], *, size: int) -> None:
        """Let ranks of generation 1 arrive at the first round of a barrier."""
        arrival = Arrival(
            job=name,
            name=barrier,
            generation=1,
            round=1,
            ranks=tuple(ranks),
            payloads=(),
            participants=(),
            age_ms=0,
            timeout_ms=0,
            phases=(),
        )
        self.book.add(arrival, size=size, now_ms=self.loop_now_ms() - 9_000)

    def save(self, name: str, step: int, state: CheckpointState, *, ranks: int, reason: str = "") -> None:
        """Write a checkpoint's record."""
        self.put(
            KEYS.job(name).checkpoint(step, 1),
            CheckpointRecord(
                attempt=AttemptId(f"a{step}"),
                step=step,
                generation=1,
                type=CheckpointType.FULL,
                state=state,
                ranks=ranks,
                path=f"file:///ckpt/{name}/step-{step}",
                created_unix_ms=1_700_000_000_000,
                size_bytes=1 << 20,
                reason=reason,
            ),
        )

    # -- the methods of a `Source`

    def is_healthy(self) -> tuple[bool, str]:
        return True, ""

    def is_ready(self) -> tuple[bool, str]:
        return (False, self.unwritable) if self.unwritable else self.ready

    def outage(self) -> str:
        return self.unwritable

    def diagnosis(self, name: str) -> Diagnosis:
        return diagnose_job(self.soft, JobView(self.view, KEYS.job(name)))

    def job_phases(self) -> Mapping[str, str]:
        return self.phases.phases()

    async def call(self, name: str, request: Any, identity: Identity | None) -> Any:
        if self.refuses is not None:
            raise self.refuses
        self.calls.append((name, request, identity))

    def leader(self) -> Entry[records.Leader] | None:
        return leader_of(self.view, KEYS)

    def replicas(self) -> list[ReplicaState]:
        return [
            ReplicaState(entry=entry, leader=True, ready=True, reason="")
            for entry in self.view.entries(KEYS.replicas, records.Replica)
        ]

    def logged_events(self, job: str | None = None, *, limit: int) -> Iterator[LoggedEvent]:
        return self.event_log.logged_events(job, limit=limit)

    def etcd_members(self) -> Sequence[EtcdMember]:
        self.etcd_requests += 1
        return self.etcd

    def epoch(self) -> int | None:
        return EPOCH

    def etcd_silence_s(self) -> float:
        return 0.1

    def etcd_revision(self) -> int:
        return self.view.revision

    def audit_differences(self) -> int:
        return 0

    def loop_lag_s(self) -> tuple[float, float]:
        return 0.0, 0.0

    def unix_now(self) -> float:
        return self.unix_s()

    def loop_now_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1000
