"""The event log: recent events of the cluster, described with the words of their records, and the counts of all events.

A subscriber of the mirror. It records leaders, replicas, members, generations, failed ranks, broken barriers
and ended saves. It keeps the latest events for people, and counts all of them. No decision reads the log. A
replica that has just started has no earlier events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from strata.coordinator.measures import Measures
from strata.core.checkpoints.references import SavesHeld
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import (
    BarrierOutcome,
    BarrierResult,
    CheckpointRecord,
    CheckpointState,
    JobPhase,
    Leader,
    PoisonRecord,
    RankFailed,
    StopNotice,
    WorldHead,
)
from strata.core.kv.txn import Event, WatchBatch
from strata.core.kv.view import View
from strata.core.stop.requests import act
from strata.observe import get_logger

log = get_logger()

KEPT: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent:
    """One event. `job` is empty if the event concerns the cluster."""

    unix_s: float
    revision: int
    kind: str
    job: str
    text: str


class EventLog:
    """Keeps the last `KEPT` events, newest last."""

    def __init__(
        self, view: View, keys: ClusterKeys, measures: Measures, unix_now: Callable[[], float]
    ) -> None:
        self._view = view
        self._keys = keys
        self._unix_now = unix_now
        self._happened: deque[LoggedEvent] = deque(maxlen=KEPT)
        self._leader_changes = measures.leader_changes.child()
        self._generations = measures.generations.child()
        self._rounds = {result: measures.rounds.child(result.value) for result in BarrierResult}
        self._checkpoints = {
            state: measures.checkpoints.child(state.value)
            for state in (CheckpointState.COMMITTED, CheckpointState.ABORTED, CheckpointState.CORRUPT)
        }
        self._states: dict[str, CheckpointState] = {}

    def logged_events(self, job: str | None = None, *, limit: int) -> Iterator[LoggedEvent]:
        """Yield the last events, newest first; only those of `job`, if it is given."""
        for logged_event in reversed(self._happened):
            if limit <= 0:
                return
            if job is None or logged_event.job == job:
                limit -= 1
                yield logged_event

    def begin(self) -> None:
        """Learn the existing states without counting them. Call it before the first batch."""
        for kv in self._view.walk(self._keys.jobs):
            try:
                match self._keys.parts(kv.key):
                    case ("jobs", _, "checkpoints", _, _):
                        record = self._view.record(kv.key, CheckpointRecord)
                        self._states[kv.key] = record.state if record else CheckpointState.OPEN
                    case _:
                        pass
            except PoisonRecord:
                continue  # the replicas that serve the job report this record

    def take(self, batch: WatchBatch) -> None:
        """Record the events of a batch that the view has already applied."""
        for event in batch.events:
            try:
                self._sort(event, self._keys.parts(event.kv.key))
            except (PoisonRecord, ValueError) as error:  # a hand-written key or record
                log.debug("event_not_understood", key=event.kv.key[:500], error=str(error))

    def _sort(self, event: Event, parts: tuple[str, ...]) -> None:
        key, view = event.kv.key, self._view
        match parts:
            case ("leader",):
                leader = view.record(key, Leader)
                if event.deleted or leader is None:
                    self._note(event, "leader", "", "no leader: the leader's key was deleted")
                else:
                    self._leader_changes.add()
                    self._note(
                        event, "leader", "", f"{leader.replica} leads, epoch {event.kv.create_revision}"
                    )
            case ("replicas", name):
                self._on_created_or_deleted(event, "coordinator", "", name)
            case ("jobs", job, "workers", name):
                self._on_created_or_deleted(event, "member", job, name)
            case ("jobs", job, "world"):
                self._on_head(event, job)
            case ("jobs", job, "phase"):
                phase = view.record(key, JobPhase)
                if phase is not None:
                    self._note(event, "phase", job, f"{phase.phase.value}: {phase.reason}")
            case ("jobs", job, "worlds", generation, "failed", rank):
                failed = view.record(key, RankFailed)
                if failed is not None:
                    self._note(
                        event,
                        "rank",
                        job,
                        f"rank {int(rank)} of generation {int(generation)} on {failed.worker} ended:"
                        f" {failed.reason}",
                    )
            case ("jobs", job, "worlds", generation, "held"):
                self._on_held(event, job, int(generation))
            case ("jobs", job, "worlds", generation, "notice"):
                self._on_notice(event, job, int(generation))
            case ("jobs", job, "barriers", name, _, round_, "outcome"):
                self._on_outcome(event, job, name, int(round_))
            case ("jobs", job, "checkpoints", _, _):
                self._on_checkpoint(event, job)
            case _:
                pass

    def _on_created_or_deleted(self, event: Event, kind: str, job: str, name: str) -> None:
        if event.deleted:
            self._note(event, kind, job, f"{name} is not registered any more")
        elif event.kv.create_revision == event.kv.mod_revision:
            self._note(event, kind, job, f"{name} registered")

    def _on_head(self, event: Event, job: str) -> None:
        head = self._view.record(event.kv.key, WorldHead)
        if head is None:
            return
        self._generations.add()  # a head is written once a generation
        what = "forms" if head.forming else f"has {head.size} ranks on {head.members} members"
        self._note(event, "generation", job, f"generation {head.generation} {what}: {head.reason}")

    def _on_notice(self, event: Event, job: str, generation: int) -> None:
        """Record a notice to the ranks of a generation, from a user or from the leader."""
        notice = self._view.record(event.kv.key, StopNotice)
        if notice is not None:
            who = f" ({', '.join(notice.workers[:4])})" if notice.workers else ""
            what = f"{act(notice)}{who}, {notice.reason}"
            self._note(event, "notice", job, f"generation {generation} has a stop request: {what}")

    def _on_held(self, event: Event, job: str, generation: int) -> None:
        held = self._view.record(event.kv.key, SavesHeld)
        if held is not None:
            why = f"{held.reason} on host {held.host}"
            self._note(event, "checkpoint", job, f"rank {held.rank} cannot save step {held.step}: {why}")
            log.warning("saves_held", job=job, generation=generation, step=held.step, reason=why)

    def _on_outcome(self, event: Event, job: str, name: str, round_: int) -> None:
        if event.deleted:
            return
        outcome = self._view.record(event.kv.key, BarrierOutcome)
        if outcome is None:
            return
        self._rounds[outcome.result].add()
        if outcome.result is not BarrierResult.RELEASED:
            self._note(event, "barrier", job, f"{name}, round {round_}: {outcome.reason}")

    def _on_checkpoint(self, event: Event, job: str) -> None:
        key = event.kv.key
        record = None if event.deleted else self._view.record(key, CheckpointRecord)
        if record is None:
            self._states.pop(key, None)
            return
        if self._states.get(key) is record.state:
            return
        self._states[key] = record.state
        if (counter := self._checkpoints.get(record.state)) is not None:
            counter.add()
            if record.state is not CheckpointState.COMMITTED:  # a commit is routine; the catalog shows it
                why = f": {record.reason}" if record.reason else ""
                self._note(event, "checkpoint", job, f"step {record.step} {record.state.value}{why}")

    def _note(self, event: Event, kind: str, job: str, text: str) -> None:
        self._happened.append(
            LoggedEvent(
                unix_s=self._unix_now(), revision=event.kv.mod_revision, kind=kind, job=job, text=text
            )
        )
