"""Durations of saves: each rank reports its own with its ack, and the watch shows those of whole checkpoints.

    begin ──▶ each rank: snapshot, write, ack ──▶ the last ack ──▶ committed

`save` is the whole time, `commit` the time from the last ack on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from strata.coordinator.measures import Measures
from strata.core.barriers.arrivals import MAX_TIME_MS
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import CheckpointRecord, CheckpointState, CheckpointType, PoisonRecord
from strata.core.kv.txn import WatchBatch
from strata.core.kv.view import View
from strata.v1.common_pb2 import SavePhase

PHASES: Final = frozenset({"snapshot", "write", "copy"})
BACKENDS: Final = frozenset({"file", "s3"})
OTHER: Final = "other"
MAX_REPORTED: Final = 4
"""The most phases read from one report."""
MAX_BYTES: Final = 1 << 50

Committed = Callable[[str, float], None]
"""Receives a job, and the seconds from a checkpoint's begin to its commit."""


@dataclass(slots=True)
class _Save:
    """A checkpoint that this replica saw begin, on the replica's clock."""

    began_s: float
    acked_s: float | None = None
    """When the newest ack was seen."""


class SaveTimes:
    """Counts into `measures` the ranks' reports at this replica, and all checkpoints that it sees."""

    def __init__(
        self,
        view: View,
        keys: ClusterKeys,
        measures: Measures,
        *,
        clock: Callable[[], float],
        committed: Committed,
    ) -> None:
        self._view = view
        self._keys = keys
        self._measures = measures
        self._clock = clock
        self._committed = committed
        self._open: dict[str, _Save] = {}

    def reported(self, type_: CheckpointType, phases: Iterable[SavePhase]) -> None:
        """Count a rank's report. Labels take known values only, whatever the sender wrote."""
        for phase in list(phases)[:MAX_REPORTED]:
            if phase.phase not in PHASES or not 0 <= phase.took_us <= 1000 * MAX_TIME_MS:
                continue
            backend = phase.backend if phase.backend in BACKENDS else OTHER
            labels = (backend, type_.value, phase.phase)
            self._measures.phase_seconds.child(*labels).observe(phase.took_us / 1e6)
            self._measures.phase_bytes.child(*labels).add(min(max(0, phase.size_bytes), MAX_BYTES))

    def take(self, batch: WatchBatch) -> None:
        """Follow checkpoints from their begin to their commit."""
        now_s = self._clock()
        for event in batch.events:
            key = event.kv.key
            match self._keys.parts(key):
                case ("jobs", job, "checkpoints", _, _):
                    self._note_record(job, key, now_s, deleted=event.deleted)
                case ("jobs", _, "checkpoints", _, _, _, "acks", rank) if (
                    rank != "seal" and not event.deleted
                ):
                    self._note_ack("/".join(key.split("/")[:-3]), now_s)
                case _:
                    pass

    def _note_ack(self, slot: str, now_s: float) -> None:
        if (save := self._open.get(slot)) is not None:
            save.acked_s = now_s

    def _note_record(self, job: str, key: str, now_s: float, *, deleted: bool) -> None:
        try:
            record = None if deleted else self._view.record(key, CheckpointRecord)
        except PoisonRecord:
            return
        if record is not None and record.state in (CheckpointState.OPEN, CheckpointState.PREPARED):
            self._open.setdefault(key, _Save(began_s=now_s))
            return
        save = self._open.pop(key, None)
        if save is None or record is None or record.state is not CheckpointState.COMMITTED:
            return
        labels = (backend_of(record.path), record.type.value)
        self._measures.save_seconds.child(*labels).observe(now_s - save.began_s)
        if save.acked_s is not None:
            self._measures.commit_seconds.child(*labels).observe(now_s - save.acked_s)
        self._committed(job, now_s - save.began_s)


def backend_of(uri: str) -> str:
    """Return the kind of storage that a URI names."""
    scheme = uri.partition("://")[0]
    return scheme if scheme in BACKENDS else OTHER
