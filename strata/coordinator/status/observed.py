"""The read-only state that a replica shows of itself and of its cluster.

The status page, the metrics and the probes read this state. `Observed` takes it from the view and from this
replica's memory, waits for nothing, and slows nothing down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message

from strata.coordinator.context import ReplicaContext
from strata.coordinator.peers.registry import NOT_RECEIVED
from strata.coordinator.status.diagnosis import Diagnoses
from strata.coordinator.status.event_log import EventLog
from strata.coordinator.status.job_phases import JobPhases
from strata.coordinator.status.live_state import LiveState
from strata.coordinator.writes.measured import MeasuredStore
from strata.core.access.authority import Identity
from strata.core.health.findings import Diagnosis
from strata.core.ids import Uid
from strata.core.kv import records
from strata.core.kv.view import Entry
from strata.core.leadership.leader import leader_of
from strata.observe.loop_lag import LoopLag

STALLED_S: Final = 2.0
"""An event loop that was late by more than this within the last ten seconds is not healthy."""


Call = Callable[[str, Message, Identity | None], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One registered replica, as this replica sees it."""

    entry: Entry[records.Replica]
    leader: bool
    ready: bool
    reason: str


class Observed:
    """The readable state of one replica. `run` measures the loop and records events."""

    def __init__(
        self, context: ReplicaContext, store: MeasuredStore, soft: LiveState, call: Call, *, version: str
    ) -> None:
        self.context = context
        self.view = context.mirror.view
        self.keys = context.keys
        self.replica = context.replica
        self.instance = context.instance
        self.measures = context.measures
        self.connections = context.connections
        self.charts = context.charts
        self.outage = context.outage
        """Returns why no replica can write; an empty string while writes are possible."""
        self.etcd_members = context.etcd_members
        """Returns the status of etcd's members, some seconds old."""
        self.etcd_silence_s = context.mirror.silence_s
        """Returns for how long etcd has not answered at all."""
        self.unix_now = context.unix_now
        self.soft = soft
        self._call = call
        self.version = version
        self._store = store
        self._event_log = EventLog(context.mirror.view, context.keys, context.measures, context.unix_now)
        self.logged_events = self._event_log.logged_events
        self._diagnoses = Diagnoses()
        self._phases = JobPhases(context.mirror.view, context.keys)
        self.job_phases = self._phases.phases
        self.lag = LoopLag()

    @property
    def uid(self) -> Uid:
        """The cluster's uid; empty until the keyspace was read once."""
        return self.context.mirror.uid

    def is_healthy(self) -> tuple[bool, str]:
        """Return whether this process's event loop keeps up, and if not, why."""
        worst_s = self.lag.worst_s()
        if worst_s > STALLED_S:
            return False, f"the event loop stalled for {worst_s:.1f} s"
        return True, ""

    def is_ready(self) -> tuple[bool, str]:
        """Return whether members may be sent to this replica and etcd accepts writes, and if not, why.

        This answer is for people, probes and load balancers. Decisions about members use `context.is_ready`
        instead: while no replica can write, members stay where they are.
        """
        outage = self.outage()
        return (False, outage) if outage else self.context.is_ready()

    def diagnosis(self, name: str) -> Diagnosis:
        """Return a job's diagnosis, at most a second old; `StrataError` if the job cannot be read."""
        return self._diagnoses.of(self.soft, self.context.job(name))

    def leader(self) -> Entry[records.Leader] | None:
        """Return the leader's record; the create revision of its key is the epoch."""
        return leader_of(self.view, self.keys)

    def replicas(self) -> list[ReplicaState]:
        """Return every registered replica, ordered by name."""
        held = self.leader()
        leader = held.record.instance if held is not None else ""
        return [
            self._replica(entry, leader=entry.record.instance == leader)
            for entry in self.view.entries(self.keys.replicas, records.Replica)
        ]

    async def call(self, name: str, request: Message, identity: Identity | None) -> Any:
        """Answer an operator's call, by its name in session.proto; `Unavailable` while this replica does not serve."""
        return await self._call(name, request, identity)

    def epoch(self) -> int | None:
        """Return the epoch in which this replica may act as leader at this moment, or None."""
        return self.context.election.epoch

    def etcd_revision(self) -> int:
        """Return the newest revision in any answer of etcd."""
        return self._store.revision

    def audit_differences(self) -> int:
        """Return how many keys of the view audits have found wrong since the start."""
        return self.context.mirror.differences

    def loop_lag_s(self) -> tuple[float, float]:
        """Return how late the loop was at the last measurement, and at worst within the last ten seconds."""
        return self.lag.last_s, self.lag.worst_s()

    def loop_now_ms(self) -> float:
        """Return the time on the clock that open rounds use, in milliseconds."""
        return asyncio.get_running_loop().time() * 1000

    async def run(self) -> None:
        """Measure, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.lag.run(), name="loop lag")
            await self.context.mirror.started()
            self._event_log.begin()
            takers = (self._event_log.take, self.context.save_times.take)
            leave = [self.context.mirror.subscribe(take) for take in takers]
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                for each in leave:
                    each()

    def _replica(self, entry: Entry[records.Replica], *, leader: bool) -> ReplicaState:
        if entry.record.instance == self.context.instance:
            ready, reason = self.is_ready()
        else:
            ready = entry.record.instance in self.soft.ready_peers()
            reason = "" if ready else NOT_RECEIVED
        return ReplicaState(entry=entry, leader=leader, ready=ready, reason=reason)
