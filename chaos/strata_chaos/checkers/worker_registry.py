"""Checks the registry of workers: keys are deleted for a reason, and incarnations are right (PROTOCOLS 5).

The histories must show a reason for each deletion: the member left, its process was killed or ended, a fault hit its
network path or its process, or another process replaced it. A process is known to have been alive at the deletion
only if it recorded something later. So a deletion is a violation if three conditions hold: the process recorded
something later, it had not announced its departure, and no fault touched it.

Limit: this rule is not judged for members that use unary calls. They are removed when their heartbeats are missing,
and one slow call is enough for a removal. The other rules are judged for them too.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final, NamedTuple

from strata_chaos.checkers.findings import Findings
from strata_chaos.checkers.truth import Change, Clock, Event, Held, Lives, State
from strata_chaos.history import Outcome, Record, Where

RULES: Final = {
    "hand-over": "a Put on a worker's key keeps its boot; another boot comes by delete and create",
    "deleted-for-a-reason": "a member is not removed while its process lives, has not left and is under no fault",
    "stale-never-acts": "acks and seals name the incarnation that the worker has at that moment",
    "reported-incarnation": "the incarnation that a client received is that of its own process's key",
}

WINDOW_S: Final = 20.0
"""A fault explains deletions until this long after its healing: time for detection, grace, and removal of orphans."""
NOTICED_S: Final = 5.0
"""A parent notices its child's death within this time, so the child was alive until this long before the notice."""
WITHDRAWN_S: Final = 1.0
"""How long after an abandoned join its key may be deleted."""
_ENDS: Final = frozenset({"process.kill", "process.ending", "process.asked_to_stop", "process.ended"})
_TOUCHING: Final = ("member", "rank", "agent", "worker", "client", "host")
"""Words in the names of faults that touch members or their network path; no other fault may cause a removal."""


class Deletion(NamedTuple):
    """One deletion of a worker key."""

    job: str
    worker: str
    incarnation: int
    pid: int
    revision: int
    seen_t: float
    orphan: bool
    where: Where


class Registry:
    """The worker registry checker; its rules are in `RULES`."""

    def __init__(self) -> None:
        self.findings = Findings("registry", RULES)
        self._deletions: list[Deletion] = []
        self._pids: dict[tuple[int, str, str, int], int] = {}
        """(life, job, worker, incarnation) -> pid."""
        self._lives = Lives()
        self._leaving: dict[tuple[int, str], float] = {}
        self._given_up: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        """(process, worker) -> periods after an abandoned join, in which the worker's key may be deleted."""
        self._killed: dict[int, float] = {}
        self._alive_until: dict[int, tuple[float, Where]] = {}
        self._unary: set[int] = set()
        self._faults: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        """(fault, target) -> periods in force."""
        self._hosts: dict[str, str] = {}
        """Job -> host of all its processes; empty in runs that do not record it."""

    # -- etcd

    def lost(self, end: State) -> None:
        """Do nothing: incarnations are kept by life of etcd."""

    def change(self, change: Change, before: State) -> None:
        self._lives.change(change)
        if change.restoring or change.unserved:
            return  # a restore removes all members, which then register again
        for event in change.events:
            kind = event.key.kind
            if kind == "worker":
                if event.deleted:
                    self._deleted(change, event, before)
                else:
                    self._put(change, event)
            elif kind in {"ack", "seal"} and not event.deleted:
                self._acted(change, event, before)

    def _put(self, change: Change, event: Event) -> None:
        value = event.value or {}
        worker = event.key.ids[0]
        self._pids[change.life, event.key.job, worker, event.create_revision] = value.get("pid", 0)
        if event.before is not None:
            boot = (event.before.value or {}).get("boot")
            self.findings.check(
                "hand-over",
                boot == value.get("boot") and event.create_revision == event.before.create_revision,
                f"{worker} of {event.key.job} went from boot {boot} to {value.get('boot')} at revision"
                f" {change.revision} without a deletion in between",
                event.where,
            )

    def _deleted(self, change: Change, event: Event, before: State) -> None:
        held = event.before
        if held is None:
            return
        value = held.value or {}
        instances = {(replica.value or {}).get("instance") for _key, replica in before.all("replica")}
        self._deletions.append(
            Deletion(
                job=event.key.job,
                worker=event.key.ids[0],
                incarnation=held.create_revision,
                pid=value.get("pid", 0),
                revision=change.revision,
                seen_t=change.t,
                orphan=value.get("served_by") not in instances,
                where=event.where,
            )
        )

    def _acted(self, change: Change, event: Event, before: State) -> None:
        value = event.value or {}
        worker = str(value.get("worker"))
        held: Held | None = before.get("worker", event.key.job, worker)
        self.findings.check(
            "stale-never-acts",
            held is not None and held.create_revision == value.get("incarnation"),
            f"{event.name} was written at revision {change.revision} for incarnation"
            f" {value.get('incarnation')} of {worker}, which "
            + ("is not registered" if held is None else f"is incarnation {held.create_revision}"),
            event.where,
        )

    # -- clients

    def record(self, record: Record) -> None:
        op, args = record.op, record.args
        if record.client == "nemesis":
            self._fault(record)
            return
        if op in _ENDS:
            self._killed[args["pid"]] = min(record.t0, self._killed.get(args["pid"], record.t0))
        elif op == "member.leave":
            key = record.process, args["worker"]
            self._leaving[key] = min(record.t0, self._leaving.get(key, record.t0))
        elif op in {"member.heartbeat", "member.register"}:
            self._unary.add(record.process)
        elif op == "member.join":
            self._gave_up(record)
        if op in {"member.join", "member.rejoin", "member.register"} and record.outcome is Outcome.OK:
            self._incarnation(record)
        self._lived(record.process, record.t0 if record.t1 is None else record.t1, record.where)
        if op == "process.ended":
            self._lived(args["pid"], record.t0 - NOTICED_S, record.where)

    def _gave_up(self, record: Record) -> None:
        """Note a join that ended without a place: the client withdraws its registration."""
        if record.outcome is not Outcome.OK and record.t1 is not None:
            key = record.process, record.args["worker"]
            self._given_up[key].append((record.t0, record.t1 + WITHDRAWN_S))

    def _lived(self, pid: int, until: float, where: Where) -> None:
        if until >= self._alive_until.get(pid, (0.0, where))[0]:
            self._alive_until[pid] = until, where

    def _incarnation(self, record: Record) -> None:
        args, reported = record.args, record.result.get("incarnation")
        life = self._lives.of(record.result.get("uid"))
        pid = self._pids.get(
            (life, args["job"], args["worker"], reported if isinstance(reported, int) else 0)
        )
        self.findings.check(
            "reported-incarnation",
            pid == record.process,
            f"process {record.process} received incarnation {reported} of {args['worker']}, whose key names"
            f" process {pid}",
            record.where,
        )

    def _fault(self, record: Record) -> None:
        """Note when a fault touched members: from its injection until it was healed."""
        if record.op == "job.placed":
            self._hosts[record.args["job"]] = record.args["host"]
            return
        fault = str(record.args.get("fault", ""))
        for target in map(str, record.args.get("targets") or ()):
            if not any(word in f"{fault} {target}" for word in _TOUCHING):
                continue
            windows = self._faults[fault, target]
            if record.op == "fault.inject":
                windows.append((record.t0, float("inf")))
            elif record.op == "fault.heal" and windows:
                windows[-1] = windows[-1][0], record.t0 if record.t1 is None else record.t1

    def _under_fault(self, deletion: Deletion) -> bool:
        """Return whether a fault of this process or of its host may explain the deletion."""
        return any(
            begin <= deletion.seen_t and until >= deletion.seen_t - WINDOW_S
            for (_fault, target), windows in self._faults.items()
            if self._hits(target, deletion)
            for begin, until in windows
        )

    def _hits(self, target: str, deletion: Deletion) -> bool:
        if (pid := _process_of(target)) is not None:
            return pid == deletion.pid
        return self._hosts.get(deletion.job, target) == target

    # -- end of the run

    def finish(self, clock: Clock, end: State) -> None:
        reasons: dict[str, int] = defaultdict(int)
        for deletion in self._deletions:
            reason = self._reason(deletion)
            reasons[reason or "no reason"] += 1
            life = self._alive_until.get(deletion.pid)
            evidence = (deletion.where,) if life is None else (deletion.where, life[1])
            self.findings.check(
                "deleted-for-a-reason",
                bool(reason),
                f"{deletion.worker} of {deletion.job} (incarnation {deletion.incarnation}, process {deletion.pid}) was removed"
                f" at revision {deletion.revision}, though its process lived on, had not left, and no fault"
                f" touched it" + ("; the replica that served it had ended" if deletion.orphan else ""),
                *evidence,
            )
        if reasons:
            reported = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
            self.findings.notes.append(f"members removed: {reported}")

    def _reason(self, deletion: Deletion) -> str:
        """Return the reason for a deletion that the histories show; empty if they exclude every reason."""
        left = self._leaving.get((deletion.pid, deletion.worker))
        if left is not None and left <= deletion.seen_t:
            return "left"
        killed = self._killed.get(deletion.pid)
        if killed is not None and killed <= deletion.seen_t:
            return "ended"
        joins = self._given_up.get((deletion.pid, deletion.worker), ())
        if any(begin <= deletion.seen_t <= until for begin, until in joins):
            return "given up by its join"
        if self._under_fault(deletion):
            return "under a fault"
        if deletion.pid in self._unary:
            return "silent"
        life = self._alive_until.get(deletion.pid)
        if life is None or life[0] <= deletion.seen_t:
            return "no later record"
        return ""


def _process_of(target: str) -> int | None:
    """Return the pid in a target such as "member:4711"; None if it names a host or another part."""
    _role, _, pid = target.rpartition(":")
    return int(pid) if pid.isdigit() else None
