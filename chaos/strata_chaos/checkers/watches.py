"""Checks relayed watches: each of etcd's events arrives once, in order, across every resume (PROTOCOLS 3.2-3.4).

Each message of a reader's stream covers the events from the stream's position to the message's revision. The checker
compares them one by one with etcd's events. A message marked `resync` begins a full state, which must equal etcd's
state at the message's revision. A stream without a resume token must begin with a resync.

A stream that delivers nothing breaks none of these rules, so silence has its own rule. An event in etcd must arrive
within `SILENT_S`, not counting the time of a fault and a short time after it. A progress message below the event's
revision does not satisfy the rule, because a replica whose own watch of etcd is stuck sends such messages too.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from strata_chaos.checkers.findings import Findings
from strata_chaos.checkers.keyspace import parse_key
from strata_chaos.checkers.truth import Change, Clock, Lives, State
from strata_chaos.history import Outcome, Record, Where

RULES: Final = {
    "exact": "a stream delivers etcd's events after its position: in order, no gap, none twice",
    "resync-state": "a resync is the whole state of the revision that it reaches",
    "resync-marked": "a stream without a resume token begins with a resync",
    "not-silent": "while no fault is in force, a stream delivers an event within ten seconds",
    "never-back": "a stream never reaches a revision below its position, nor another cluster's",
}

SILENT_S: Final = 10.0
"""How late a stream may deliver an event. Without a fault every delivery takes far less."""
CALM_S: Final = 10.0
"""How long a healed fault may still delay a stream: the failure must be detected and a new connection made."""
NOTICED_S: Final = 5.0
"""Limit of the time between a child's death and its parent's record of it: the child may have been dead for so long."""

LiveReports = tuple[str, int, str | None]
"""A key below the job, the revision, and the digest of its value; None for a deletion."""


@dataclass(slots=True)
class JobLog:
    """All events of one job in compact form: 28 bytes an event."""

    revisions: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    keys: array[int] = field(default_factory=lambda: array("i"))
    digests: array[int] = field(default_factory=lambda: array("Q"))
    names: list[str] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    """Indices of deletions."""

    def add(self, name: str, revision: int, seen_t: float, digest: str | None) -> None:
        key = self.ids.get(name)
        if key is None:
            key = self.ids[name] = len(self.names)
            self.names.append(name)
        if digest is None:
            self.deleted.add(len(self.revisions))
        self.revisions.append(revision)
        self.times.append(seen_t)
        self.keys.append(key)
        self.digests.append(int(digest, 16) if digest is not None else 0)

    def event(self, index: int) -> LiveReports:
        digest = None if index in self.deleted else f"{self.digests[index]:016x}"
        return self.names[self.keys[index]], self.revisions[index], digest

    def next(self, revision: int, prefix: str, until_t: float) -> int | None:
        """Return the index of the first event above `revision` that was seen by `until_t`, or None."""
        for index in range(bisect_right(self.revisions, revision), len(self.revisions)):
            if self.times[index] > until_t:
                return None
            if self.names[self.keys[index]].startswith(prefix):
                return index
        return None

    def after(self, index: int, revision: int, prefix: str) -> tuple[list[LiveReports], int]:
        """Return the events from `index` up to `revision`, and the index after them."""
        found = []
        while index < len(self.revisions) and self.revisions[index] <= revision:
            if self.names[self.keys[index]].startswith(prefix):
                found.append(self.event(index))
            index += 1
        return found, index

    def state(self, revision: int, prefix: str) -> tuple[dict[str, tuple[int, str | None]], int]:
        """Return every key at `revision`, and the index of the first event after it."""
        held: dict[str, tuple[int, str | None]] = {}
        events, index = self.after(0, revision, prefix)
        for name, mod_revision, digest in events:
            if digest is None:
                held.pop(name, None)
            else:
                held[name] = mod_revision, digest
        return held, index


@dataclass(frozen=True, slots=True)
class Silence:
    """A period, longer than `SILENT_S`, in which a stream did not deliver an event or its first message."""

    since_t: float
    until_t: float
    owed: str


@dataclass(slots=True)
class Stream:
    """The deliveries of one stream of a reader so far."""

    job: str
    prefix: str
    uid: str
    position: int | None
    begun: Where
    opened_t: float
    life: int = 0
    """Life of etcd that the stream's cluster belongs to; 0 until the first message names the cluster."""
    index: int = 0
    silences: list[Silence] = field(default_factory=list)
    resyncing: bool = False
    pending: list[LiveReports] = field(default_factory=list)
    messages: int = 0


class Watches:
    """The watch checker; its rules are in `RULES`."""

    def __init__(self) -> None:
        self.findings = Findings("watches", RULES)
        self._logs: dict[tuple[int, str], JobLog] = defaultdict(JobLog)
        """(life, job) -> events."""
        self._lives = Lives()
        self._life = 1
        self._listed: list[Record] = []
        self._streams: dict[tuple[str, int, int], Stream] = {}
        self._last: dict[int, int] = {}
        """Life -> last revision."""
        self._closed: list[tuple[str, Stream]] = []
        """Streams that were open long enough to be judged for silence."""
        self._faults: dict[object, tuple[float, float]] = {}
        self._died: dict[int, float] = {}
        """Process -> time from which it may have been dead."""
        self._end_t = float("inf")

    def lost(self, end: State) -> None:
        self._life += 1

    def change(self, change: Change, before: State) -> None:
        self._lives.change(change)
        self._last[change.life] = change.revision
        for event in change.events:
            if event.key.job:
                self._log(event.name, event.key.job, change.revision, change.t, event.raw)

    def _log(self, key: str, job: str, revision: int, seen_t: float, raw: str | None) -> None:
        name = key.split("/jobs/", 1)[1][len(job) + 1 :]
        digest = None if raw is None else sha256(raw.encode()).hexdigest()[:16]
        self._logs[self._life, job].add(name, revision, seen_t, digest)

    def _began(self) -> None:
        """Log the keys of a snapshot as the first events of the life, in the order of their revisions."""
        for record in sorted(self._listed, key=lambda record: int(record.result["revision"])):
            key, result = parse_key(record.result["key"]), record.result
            if key.job:
                self._log(result["key"], key.job, result["revision"], record.t0, result["value"])

    def record(self, record: Record) -> None:
        if record.op == "etcd.listed":
            self._listed.append(record)
        elif record.op == "observer.listed":
            if record.args["why"] == "snapshot":
                self._began()
            self._listed.clear()
        elif record.op == "watch" and record.begun:
            args = record.args
            stream = Stream(
                args["job"],
                args["prefix"],
                args["uid"],
                args["resume"],
                begun=record.where,
                opened_t=record.t0,
            )
            if stream.position is not None:
                stream.life = self._lives.of(stream.uid)
                log = self._logs[stream.life, stream.job]
                stream.index = bisect_right(log.revisions, stream.position)
            self._streams[record.client, record.process, args["stream"]] = stream
        elif record.op == "watch":
            ended = self._streams.pop((record.client, record.process, record.args["stream"]), None)
            if ended is not None and record.t1 is not None:
                self._close(record.client, ended, record.t1)
        elif record.op == "watch.message":
            key = record.client, record.process, record.args["stream"]
            if key in self._streams:
                self._owed(self._streams[key], record.t0)
                self._message(record, self._streams[key])
        elif record.op in {"process.kill", "process.ended"}:
            dead_t = record.t0 - (NOTICED_S if record.op == "process.ended" else 0.0)
            self._died[record.args["pid"]] = min(dead_t, self._died.get(record.args["pid"], dead_t))
        elif record.client == "nemesis":
            self._nemesis(record)

    def _nemesis(self, record: Record) -> None:
        """Note when a fault was in force, and when the run's last phase began."""
        number = record.args.get("id")
        if record.op == "fault.inject":
            self._faults[number] = record.t0, float("inf")
        elif record.op == "fault.heal":
            begin_t, _ = self._faults.get(number, (record.t0, 0.0))
            self._faults[number] = begin_t, record.t0 if record.t1 is None else record.t1
        elif record.op == "fault.skipped" and record.outcome is Outcome.UNKNOWN:
            self._faults[number] = record.t0, record.t0 if record.t1 is None else record.t1
        elif record.op == "run.phase" and record.args["phase"] == "end":
            self._end_t = record.t0

    def _owed(self, stream: Stream, until_t: float) -> None:
        """Note the delay of an event, when its stream delivers a message or ends."""
        since_t, owed = stream.opened_t, "a first message"
        if stream.position is not None:
            log = self._logs[stream.life, stream.job]
            index = log.next(stream.position, stream.prefix, until_t)
            if index is None:
                return
            name, revision, _digest = log.event(index)
            since_t, owed = max(since_t, log.times[index]), f"{name} of revision {revision}"
        if until_t - since_t > SILENT_S:
            stream.silences.append(Silence(since_t, until_t, owed))

    def _close(self, client: str, stream: Stream, ended_t: float) -> None:
        self._owed(stream, ended_t)
        if ended_t - stream.opened_t >= SILENT_S:
            self._closed.append((client, stream))

    def _message(self, record: Record, stream: Stream) -> None:
        check = self.findings.check
        delivered: dict[str, Any] = dict(record.result)
        stream.messages += 1
        if stream.messages == 1 and stream.position is None:
            check(
                "resync-marked",
                delivered["resync"],
                f"{record.client} had no resume token, and its first message is no resync",
                record.where,
            )
        if delivered["resync"]:
            stream.resyncing, stream.pending = True, []
        stream.pending += [(key, revision, digest) for key, revision, _created, digest in delivered["events"]]
        revision = delivered["revision"]
        if revision is None:
            return  # the next message continues this one
        check(
            "never-back",
            revision >= (stream.position or 0) and delivered["uid"] == (stream.uid or delivered["uid"]),
            f"{record.client} was at revision {stream.position} of {stream.uid or 'no cluster'} and received"
            f" {revision} of {delivered['uid']}",
            record.where,
        )
        stream.life = stream.life or self._lives.of(delivered["uid"])
        if revision <= self._last.get(stream.life, 0):
            if stream.resyncing:
                self._resynced(record.client, record.where, stream, revision)
            elif stream.position is not None:
                self._events(record.client, record.where, stream, revision)
        stream.resyncing, stream.pending = False, []
        stream.position, stream.uid = max(revision, stream.position or 0), delivered["uid"]

    def _resynced(self, client: str, where: Where, stream: Stream, revision: int) -> None:
        state, stream.index = self._logs[stream.life, stream.job].state(revision, stream.prefix)
        delivered = {key: (mod_revision, digest) for key, mod_revision, digest in stream.pending}
        differing = sorted(
            key for key in state.keys() | delivered.keys() if state.get(key) != delivered.get(key)
        )
        self.findings.check(
            "resync-state",
            not differing,
            f"{client} received a state of {stream.job} at revision {revision} that differs in"
            f" {len(differing)} keys, the first: {differing[:1]}",
            where,
        )

    def _events(self, client: str, where: Where, stream: Stream, revision: int) -> None:
        expected, stream.index = self._logs[stream.life, stream.job].after(
            stream.index, revision, stream.prefix
        )
        self.findings.check(
            "exact",
            expected == stream.pending,
            f"{client} got, after revision {stream.position} and up to {revision}, {_differ(stream.pending, expected)}",
            where,
        )

    def finish(self, clock: Clock, end: State) -> None:
        """Judge the silences, now that all faults are known.

        If a stream's end is not recorded, the stream ended with its process or with the run.
        """
        for (client, process, _stream), stream in self._streams.items():
            ended_t = min(self._end_t, self._died.get(process, self._end_t))
            if ended_t < float("inf"):
                self._close(client, stream, ended_t)
        for client, stream in self._closed:
            worst_s, owed = max(
                ((self._calm_s(each), each.owed) for each in stream.silences), default=(0.0, "")
            )
            self.findings.check(
                "not-silent",
                worst_s <= SILENT_S,
                f"a stream of {client} withheld {owed} for {worst_s:.1f} s, though no fault was in force",
                stream.begun,
            )

    def _calm_s(self, silence: Silence) -> float:
        """Return the longest part of a silence in which no fault may have delayed the stream."""
        until_t = min(silence.until_t, self._end_t)
        at_t, longest_s = silence.since_t, 0.0
        for begin_t, healed_t in sorted(self._faults.values()):
            longest_s = max(longest_s, min(begin_t, until_t) - at_t)
            at_t = max(at_t, healed_t + CALM_S)
        return max(longest_s, until_t - at_t)


def _differ(delivered: list[LiveReports], expected: list[LiveReports]) -> str:
    missing = [event for event in expected if event not in delivered]
    extra = [event for event in delivered if event not in expected]
    if missing:
        return f"{len(delivered)} events, and not {missing[0][0]} of revision {missing[0][1]}"
    if extra:
        return f"{extra[0][0]} of revision {extra[0][1]}, which etcd does not have there"
    if len(delivered) != len(expected):
        return "an event twice"
    return "events in another order than etcd's"
