"""Checks leadership: one instance for each epoch, growing epochs, and no write of a leader after its epoch.

A *leader's write* is a write whose key or value names an epoch; only a controller makes such writes. The current
epoch is the create_revision of the leader key (PROTOCOLS 4).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from strata_chaos.checkers.findings import Findings
from strata_chaos.checkers.keyspace import UNKNOWN, parse_key
from strata_chaos.checkers.truth import Change, Clock, Event, State
from strata_chaos.history import Record

RULES: Final = {
    "one-instance": "the leader key is created and deleted, never overwritten",
    "epochs-grow": "a new leader's epoch is above every earlier epoch",
    "fenced": "a write that names an epoch happens while the leader key has that create_revision",
    "leader-present": "keys of ended generations are deleted only while there is a leader",
    "samples-agree": "linearizable reads of the leader key see the same leader as the events",
    "known-keys": "docs/keyspace.md describes every key",
}

_EPOCH_IN_VALUE: Final = frozenset(
    {"world", "standbys", "phase", "reshape", "dataset-assignment", "coordinator"}
)
_CLEARED_BY_LEADER: Final = frozenset(
    {"chunk", "failed", "done", "stopped", "held", "notice", "reshape", "restored", "history"}
)


class Leadership:
    """The leadership checker; its rules are in `RULES`."""

    def __init__(self) -> None:
        self.findings = Findings("leadership", RULES)
        self._last_epoch = 0
        self._last_revision = 0
        self._since: list[int] = [0]
        self._epochs: list[int] = [0]
        self._removed_t: float | None = None
        self._gaps_s: list[float] = []
        self._samples: list[tuple[int, int, Record]] = []

    def change(self, change: Change, before: State) -> None:
        self._last_revision = change.revision
        held = before.get("leader")
        epoch = held.create_revision if held is not None else 0
        for event in change.events:
            self._event(change, event, epoch)

    def _event(self, change: Change, event: Event, epoch: int) -> None:
        check = self.findings.check
        kind = event.key.kind
        if kind == UNKNOWN:
            check("known-keys", False, f"docs/keyspace.md does not describe {event.name}", event.where)
            return
        self.findings.judged["known-keys"] += 1
        if kind == "leader":
            self._leader(change, event)
        elif change.restoring:
            return  # not a leader's write; if it is a restore's, the rule `restores/alone` judges its keys
        elif (
            not event.deleted and (kind in _EPOCH_IN_VALUE or kind == "chunk") and not _needs_no_leader(event)
        ):
            named = event.key.ids[1] if kind == "chunk" else (event.value or {}).get("epoch", 0)
            check(
                "fenced",
                named == epoch,
                f"{event.name} was written for epoch {named} at revision {change.revision}, when "
                + (f"the epoch was {epoch}" if epoch else "there was no leader"),
                event.where,
            )
        elif event.deleted and kind in _CLEARED_BY_LEADER:
            check(
                "leader-present",
                epoch > 0,
                f"{event.name} was deleted at revision {change.revision}, when there was no leader",
                event.where,
            )

    def _leader(self, change: Change, event: Event) -> None:
        if event.deleted:
            self._removed_t = change.t
            self._note(change.revision, 0)
            return
        check = self.findings.check
        before = event.before
        check(
            "one-instance",
            before is None and event.create_revision == change.revision,
            f"the leader key of epoch {event.create_revision} was overwritten at revision {change.revision}",
            event.where,
        )
        if before is not None:
            return
        check(
            "epochs-grow",
            event.create_revision > self._last_epoch,
            f"epoch {event.create_revision} follows epoch {self._last_epoch}",
            event.where,
        )
        if self._removed_t is not None:
            self._gaps_s.append(change.t - self._removed_t)
            self._removed_t = None
        self._last_epoch = event.create_revision
        self._note(change.revision, event.create_revision)

    def _note(self, revision: int, epoch: int) -> None:
        self._since.append(revision)
        self._epochs.append(epoch)

    def record(self, record: Record) -> None:
        if record.op == "observer.sample":
            self._samples.append((record.result["revision"], record.result["epoch"], record))

        elif record.op == "etcd.listed" and parse_key(record.result["key"]).kind == "leader":
            self._note(0, record.result["create_revision"])

    def lost(self, end: State) -> None:
        """Forget the epochs: an epoch is a revision, and revisions are comparable only within one life of etcd."""
        self._judge_samples()
        self._samples.clear()
        self._last_epoch = self._last_revision = 0
        self._since, self._epochs = [0], [0]
        self._removed_t = None

    def finish(self, clock: Clock, end: State) -> None:
        self._judge_samples()
        self._note_gaps()

    def _judge_samples(self) -> None:
        for revision, epoch, record in self._samples:
            if revision > self._last_revision:
                continue  # the observer's record ends before the sample's revision
            expected = self._epochs[bisect_right(self._since, revision) - 1]
            self.findings.check(
                "samples-agree",
                expected == epoch,
                f"a read at revision {revision} saw epoch {epoch}; the events have {expected}",
                record.where,
            )

    def _note_gaps(self) -> None:
        if self._gaps_s:
            gaps = sorted(self._gaps_s)
            self.findings.notes.append(
                f"{len(gaps)} changes of leader; from one key's end to the next one {gaps[len(gaps) // 2]:.2f} s"
                f" (median), {gaps[-1]:.2f} s (longest)"
            )


def _needs_no_leader(event: Event) -> bool:
    """Return whether a request wrote the phase without a leader, as a resume and an immediate pause do."""
    value = event.value or {}
    return event.key.kind == "phase" and (
        value.get("phase") == "running" or (value.get("phase") == "paused" and not value.get("epoch"))
    )
