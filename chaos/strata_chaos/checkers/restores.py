"""Checks restores: after a loss of etcd, every acknowledged commit exists again (PROTOCOLS 9).

The checker compares the state after the transaction that ends a restore with the last state of the lost etcd. If a
client got the report of a commit before that transaction, the commit must exist after it. A commit that no client got
a report of may be missing, because its marker may not have been on disk yet.

Generations, epochs and revisions belong to one uid. A restore knows a generation only if a backup or storage names
it. So the generations of a job may begin at 1 again if the job has no saves; otherwise they must not.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from strata_chaos.checkers.findings import Findings
from strata_chaos.checkers.truth import Change, Clock, State
from strata_chaos.history import Outcome, Record, Where

RULES: Final = {
    "committed-kept": "a commit that a client received, and that etcd held when it was lost, is there after the restore",
    "generations-rise": "a restored job's generation is above the head that etcd held and above that of every reported commit",
    "lineage": "a restore ends with a uid that no cluster had before, of the lost cluster's lineage",
    "alone": "until a restore ends, no other writer writes, except for transactions that were under way when an older snapshot"
    " was put under etcd; and the restore writes no key about processes",
    "restore-is-reported": "a call after the restore reports that the cluster was restored, never that it is another cluster",
}

_PROCESSES: Final = frozenset(
    {"leader", "replica", "worker", "chunk", "outcome", "arrived", "payloads", "floor", "standbys"}
    | {"coordinator", "failed", "done", "stopped", "held", "notice", "reshape", "reader", "rewind"}
)
"""Keys about processes. A restore removes them, and no writer may write them until the restore has ended."""


_LOSSES: Final = ("restore-", "rebuild-")
"""Prefixes of the names of faults that lose etcd."""


class Loss(NamedTuple):
    """A checkpoint that was committed when etcd was lost, and is missing after the restore that ended at `t`."""

    job: str
    attempt: str
    step: int
    state: str
    t: float
    where: Where


class Begun(NamedTuple):
    """The world that a restore gave to a job."""

    job: str
    generation: int
    before: int
    t: float
    where: Where


class Restores:
    """The checker of restores; its rules are in `RULES`."""

    def __init__(self) -> None:
        self.findings = Findings("restores", RULES)
        self._life = 1
        self._serving = True
        self._snapshot = False
        """Whether this life began from an older snapshot, and no restore has begun yet."""
        self._slipped = 0
        self._committed: dict[tuple[str, str], int] = {}
        """(job, attempt) -> step, for the commits in etcd at its loss."""
        self._uids: set[str] = set()
        self._lost_uid = ""
        self._kept: list[tuple[str, str, float]] = []
        self._losses: list[Loss] = []
        self._begun: list[Begun] = []
        self._generations: dict[tuple[str, str], int] = {}
        """(job, attempt) -> generation, of all commits of the run."""
        self._reported: dict[tuple[str, str], tuple[float, Where]] = {}
        self._ended = 0
        self._faults: dict[object, tuple[float, float]] = {}
        self._strangers: list[Record] = []
        """Records of clients that got `ClusterReplaced`."""

    # -- etcd

    def lost(self, end: State) -> None:
        self._life += 1
        if self._serving:  # otherwise etcd was lost again before it was restored
            self._committed = _committed(end)
            self._lost_uid = str((end.value("uid") or {}).get("uid", ""))
        self._serving = self._snapshot = False

    def change(self, change: Change, before: State) -> None:
        for event in change.of("record"):
            value = event.value or {}
            if value.get("state") == "committed":
                self._generations[event.key.job, str(value.get("attempt"))] = event.key.ids[1]
        if not self._serving:
            self._unserved(change, before)
        for event in change.of("uid"):
            self._uids.add(str((event.value or {}).get("uid")))

    def _unserved(self, change: Change, before: State) -> None:
        self._snapshot = self._snapshot and not change.restoring
        for event in change.events:
            if self._snapshot and event.key.kind not in {"uid", "leader"}:
                self._slipped += 1  # the writing replica rejects etcd's answer: its revision is older
            elif not event.deleted:
                self.findings.check(
                    "alone",
                    change.restoring and event.key.kind not in _PROCESSES,
                    f"{event.name} was written at revision {change.revision} of etcd's life {change.life}, before"
                    " a restore had ended",
                    event.where,
                )
        for event in change.of("world"):
            held = event.before.value if event.before is not None else None
            generation = (event.value or {}).get("generation", 0)
            self._begun.append(
                Begun(event.key.job, generation, (held or {}).get("generation", 0), change.t, event.where)
            )
        ends = [*change.of("uid")]
        if change.restoring and any(change.of("restoring", deleted=True)) and ends:
            self._end(change, before, str((ends[0].value or {}).get("uid")), ends[0].where)

    def _end(self, change: Change, before: State, uid: str, where: Where) -> None:
        """Judge the end of a restore; `before` has all keys that the restore wrote below the jobs."""
        self.findings.check(
            "lineage",
            uid not in self._uids and uid.partition(".")[0] == self._lost_uid.partition(".")[0],
            f"the cluster {self._lost_uid} was restored as {uid} at revision {change.revision}",
            where,
        )
        there = _committed(before)
        states = {
            (key.job, str((held.value or {}).get("attempt"))): str((held.value or {}).get("state"))
            for key, held in before.all("record")
        }
        for (job, attempt), step in self._committed.items():
            if (job, attempt) in there:
                self._kept.append((job, attempt, change.t))
            else:
                state = states.get((job, attempt), "absent")
                self._losses.append(Loss(job, attempt, step, state, change.t, where))
        self._serving = True
        self._ended += 1

    # -- clients

    def record(self, record: Record) -> None:
        if record.op == "observer.listed":
            self._snapshot = record.args["why"] == "snapshot"
        elif record.client == "nemesis":
            self._fault(record)
        elif record.error is not None and record.error.type == "ClusterRestored":
            self.findings.judged["restore-is-reported"] += 1
        elif record.error is not None and record.error.type == "ClusterReplaced":
            self._strangers.append(record)
        reported = record.op in {"checkpoint.save", "checkpoint.latest"} and record.outcome is Outcome.OK
        if reported and record.t1 is not None and record.result.get("attempt"):
            if record.op == "checkpoint.save" and not record.result.get("committed"):
                return
            key = record.args["job"], str(record.result["attempt"])
            if record.t1 < self._reported.get(key, (float("inf"), record.where))[0]:
                self._reported[key] = record.t1, record.where

    def _fault(self, record: Record) -> None:
        """Note the period in which etcd may have been lost and not yet restored."""
        number, ended_t = record.args.get("id"), record.t0 if record.t1 is None else record.t1
        if not str(record.args.get("fault", "")).startswith(_LOSSES):
            return
        if record.op == "fault.inject":
            self._faults[number] = record.t0, float("inf")
        elif record.op == "fault.heal" and number in self._faults:
            self._faults[number] = self._faults[number][0], ended_t

    # -- end of the run

    def finish(self, clock: Clock, end: State) -> None:
        unreported = 0
        for job, attempt, ended_t in self._kept:
            if self._reported.get((job, attempt), (float("inf"), None))[0] <= ended_t:
                self.findings.judged["committed-kept"] += 1
        for loss in self._losses:
            reported_t, where = self._reported.get((loss.job, loss.attempt), (float("inf"), loss.where))
            if reported_t > loss.t:
                unreported += 1
                continue
            self.findings.check(
                "committed-kept",
                False,
                f"step {loss.step} of {loss.job} (attempt {loss.attempt}) was committed when etcd was lost, and a"
                f" client had received that commit; after the restore it is {loss.state}",
                where,
                loss.where,
            )
        for begun in self._begun:
            self._rises(begun)
        for record in self._strangers:
            reported_t = record.t0 if record.t1 is None else record.t1
            assert record.error is not None
            self.findings.check(
                "restore-is-reported",
                any(begin <= reported_t and record.t0 <= until for begin, until in self._faults.values()),
                f"{record.client} received this at {record.op}, though etcd was not lost: {record.error.message}",
                record.where,
            )
        if self._life > 1:
            self.findings.notes.append(
                f"{self._life - 1} losses of etcd, {self._ended} restores; {len(self._kept)} commits were kept, and"
                f" {unreported} that no client had received were not; {self._slipped} keys were written by transactions that were"
                " under way when an older snapshot was put there"
            )

    def _rises(self, begun: Begun) -> None:
        reported = [
            (self._generations.get((job, attempt), 0), where)
            for (job, attempt), (reported_t, where) in self._reported.items()
            if job == begun.job and reported_t <= begun.t
        ]
        most, where = max(reported, default=(0, begun.where), key=lambda each: each[0])
        floor = max(most, begun.before)
        self.findings.check(
            "generations-rise",
            begun.generation > floor,
            f"a restore gave {begun.job} generation {begun.generation}, and {floor} was there before",
            begun.where,
            where,
        )


def _committed(state: State) -> dict[tuple[str, str], int]:
    return {
        (key.job, str((held.value or {}).get("attempt"))): key.ids[0]
        for key, held in state.all("record")
        if (held.value or {}).get("state") == "committed"
    }
