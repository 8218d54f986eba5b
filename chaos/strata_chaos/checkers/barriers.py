"""Checks barriers: a round releases all ranks or none, once, in its generation, with one result (PROTOCOLS 6.2-6.4).

Each arrival of a client has a payload that is unique in the run. So a payload identifies its arrival, and links an
outcome in etcd to the clients' records. Each payload in a release must belong to an arrival that had begun when the
release was seen. Each client whose call returned must have got exactly that release.

To save memory, the checker keeps a release as hashes of its payloads, eight bytes each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from strata_chaos.checkers.findings import Findings
from strata_chaos.checkers.truth import Change, Clock, Event, State
from strata_chaos.history import Outcome, Record, Where

RULES: Final = {
    "once": "a round has one outcome, for ever: released, timed out or broken",
    "current": "an outcome is written only while its generation is the head's",
    "floor": "a release sets the floor to its round, and the floor only rises",
    "well-formed": "an outcome names the round of its key; a release has no missing rank",
    "all-arrived": "a released participant's arrival had begun when the release was seen",
    "one-round": "an arrival counts in one round only",
    "release-matches-etcd": "a released client received the payloads that etcd holds for the same round",
    "outcome-matches-etcd": "a client that received a timed-out or broken round is in no release of that arrival,"
    " and etcd has such an outcome",
    "participants": "a client's release has exactly the ranks that the client arrived with",
}


def _hash(*parts: object) -> int:
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


class Barriers:
    """The barrier checker; its rules are in `RULES`."""

    def __init__(self) -> None:
        self.findings = Findings("barriers", RULES)
        self._ended: set[int] = set()
        """Rounds that have an outcome."""
        self._arrivals: dict[int, tuple[int, float]] = {}
        """Hash of (job, name, generation, rank, payload) -> revision and time of the release that contains it."""
        self._where: dict[int, Where] = {}
        """Revision of a release -> line of its outcome."""
        self._open: Counter[int] = Counter()
        self._releases: dict[int, int] = {}
        """Hash of all payloads of a release -> revision."""
        self._not_released: Counter[tuple[str, str, int, str]] = Counter()
        self._recorded: set[tuple[str, str]] = set()
        """(job, name) of barriers whose arrivals clients record."""
        self._names: dict[int, tuple[str, str]] = {}
        self._begun: set[int] = set()

    # -- etcd

    def lost(self, end: State) -> None:
        """Forget the rounds.

        After a restore, a generation may occur again with the same rounds if no storage root names it.
        """
        self._ended.clear()

    def change(self, change: Change, before: State) -> None:
        if change.restoring or change.unserved:
            return  # a restore ends all rounds; no client gets a release that takes effect in a restored snapshot
        for event in change.events:
            if event.deleted:
                continue
            if event.key.kind == "outcome":
                self._outcome(change, event, before)
            elif event.key.kind == "floor":
                rises = event.before is None or _of(event.before.value, "round") < _of(event.value, "round")
                self.findings.check(
                    "floor", rises, f"{event.name} fell at revision {change.revision}", event.where
                )

    def _outcome(self, change: Change, event: Event, before: State) -> None:
        check = self.findings.check
        job, (name, generation, round_) = event.key.job, event.key.ids
        what = f"round {round_} of barrier {name} of {job}, generation {generation},"
        value = event.value or {}
        identity = _hash(job, name, generation, round_)
        check(
            "once",
            identity not in self._ended and event.before is None,
            f"{what} got a second outcome ({value.get('result')}) at revision {change.revision}",
            event.where,
        )
        self._ended.add(identity)
        current = _of(before.value("world", job), "generation")
        check(
            "current",
            current == generation,
            f"{what} ended ({value.get('result')}) at revision {change.revision}, when the world was at"
            f" generation {current}",
            event.where,
        )
        released = value.get("result") == "released"
        check(
            "well-formed",
            (value.get("generation"), value.get("round")) == (generation, round_)
            and not (released and value.get("missing")),
            f"{what} holds {value}",
            event.where,
        )
        if not released:
            self._not_released[job, name, generation, str(value.get("result"))] += 1
            return
        floors = [
            _of(e.value, "round") for e in change.of("floor") if e.key == ("floor", job, (name, generation))
        ]
        last = _of(before.value("floor", job, name, generation), "round")
        check(
            "floor",
            floors == [round_] and last < round_,
            f"{what} was released at revision {change.revision} above floor {last}, and set it to {floors}",
            event.where,
        )
        self._release(change, event, job, name, generation, round_)

    def _release(
        self, change: Change, event: Event, job: str, name: str, generation: int, round_: int
    ) -> None:
        payloads = dict((event.value or {}).get("payloads") or {})
        for chunk in change.of("payloads"):
            if chunk.key.job == job and chunk.key.ids[:3] == (name, generation, round_):
                payloads |= (chunk.value or {}).get("payloads") or {}
        if not payloads:
            return
        at = change.at
        self._releases[_whole(job, name, generation, payloads)] = at
        for rank, payload in payloads.items():
            arrival = _hash(job, name, generation, rank, payload)
            earlier = self._arrivals.get(arrival)
            self.findings.check(
                "one-round",
                earlier is None,
                f"the payload of rank {rank} of {job} at {name} in generation {generation} was released at"
                f" revisions {earlier} and {change.revision}",
                event.where,
            )
            self._arrivals[arrival] = at, change.t
        self._open[at] = len(payloads)
        self._where[at] = event.where
        self._names[at] = job, name

    # -- clients

    def record(self, record: Record) -> None:
        if record.op != "barrier":
            return
        args = record.args
        arrival = _hash(args["job"], args["name"], args["generation"], args["rank"], args["payload"])
        self._recorded.add((args["job"], args["name"]))
        if arrival not in self._begun:
            self._began(record, arrival)
        if record.begun:
            return
        if record.outcome is Outcome.OK:
            self._returned(record, arrival)
        elif record.error is not None and record.error.type in {"BarrierTimeout", "BarrierBroken"}:
            self._ended_otherwise(record, arrival)

    def _began(self, record: Record, arrival: int) -> None:
        """Judge the first line of an arrival. The lines of the arrival's retries come later in the same file."""
        self._begun.add(arrival)
        release = self._arrivals.get(arrival)
        if release is None:
            return
        revision, seen_t = release
        where = self._where[revision]
        self.findings.check(
            "all-arrived",
            record.t0 <= seen_t,
            f"{record.client} began to arrive at {record.args['name']} {record.t0 - seen_t:.3f} s after"
            f" its release (revision {revision}) was seen",
            record.where,
            where,
        )
        self._open[revision] -= 1

    def _returned(self, record: Record, arrival: int) -> None:
        args, delivered = record.args, record.result["payloads"]
        release = self._arrivals.get(arrival)
        revision = self._releases.get(_whole(args["job"], args["name"], args["generation"], delivered))
        self.findings.check(
            "release-matches-etcd",
            release is not None and revision == release[0],
            f"{record.client} was released from {args['name']} in generation {args['generation']} with payloads"
            + (
                f" that no release in etcd has; its arrival is in that of revision {release[0]}"
                if release is not None
                else ", and no release in etcd has its arrival"
            ),
            record.where,
            *((self._where[release[0]],) if release is not None else ()),
        )
        self.findings.check(
            "participants",
            set(delivered) == {str(rank) for rank in args["ranks"]},
            f"{record.client} arrived with ranks {args['ranks']} and was released with {sorted(delivered)}",
            record.where,
        )

    def _ended_otherwise(self, record: Record, arrival: int) -> None:
        args = record.args
        assert record.error is not None
        result = "timed_out" if record.error.type == "BarrierTimeout" else "broken"
        release = self._arrivals.get(arrival)
        there = self._not_released[args["job"], args["name"], args["generation"], result]
        self.findings.check(
            "outcome-matches-etcd",
            release is None and there > 0,
            f"{record.client} received {result} for {args['name']} in generation {args['generation']}, "
            + (
                f"and its arrival was released at revision {release[0]}"
                if release is not None
                else "and etcd has no such outcome"
            ),
            record.where,
            *((self._where[release[0]],) if release is not None else ()),
        )

    def finish(self, clock: Clock, end: State) -> None:
        for revision, missing in self._open.items():
            if self._names[revision] in self._recorded:
                job, name = self._names[revision]
                self.findings.check(
                    "all-arrived",
                    missing <= 0,
                    f"the release of {name} of {job} at revision {revision} has {missing} arrivals that no"
                    " client began",
                    self._where[revision],
                )


def _of(value: Mapping[str, Any] | None, field: str) -> int:
    found = (value or {}).get(field, 0)
    return found if isinstance(found, int) else 0


def _whole(job: str, name: str, generation: int, payloads: Mapping[str, str]) -> int:
    return _hash(job, name, generation, *(f"{rank}={payloads[rank]}" for rank in sorted(payloads)))
