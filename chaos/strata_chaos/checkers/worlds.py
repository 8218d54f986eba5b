"""Checks worlds: generations rise one by one, each has one consistent description, survivors keep their places.

See PROTOCOLS 6.1. The checker judges each head of a world at the transaction that writes the head. It compares the
places that clients record with the places in etcd, which the world's chunks contain.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from strata_chaos.checkers.findings import Findings
from strata_chaos.checkers.truth import Change, Clock, Event, Lives, State
from strata_chaos.history import Outcome, Record, Where

RULES: Final = {
    "one-by-one": "a head's generation is one above that of the head before",
    "whole": "the head's chunks hold as many members and ranks as the head states",
    "places": "group ranks and first ranks are unique and without holes, no worker is there twice",
    "members-existed": "every member of a world is an incarnation that was registered before",
    "survivors-stay": "a survivor keeps its group rank, unless the world became too small for it",
    "restore-named": "a head that restores moves `latest` and writes `restored` in its transaction",
    "chunks-stay": "the chunks of a generation do not change once its head is written",
    "reported-places": "a client's own place is that of its incarnation in the world it names",
}


Who = tuple[str, int]
"""Worker and incarnation. Two workers that registered in one transaction have the same incarnation."""


class Place(NamedTuple):
    """A member's place in one world."""

    worker: str
    incarnation: int
    group_rank: int
    slots: int
    first_rank: int


class Worlds:
    """The world checker; its rules are in `RULES`."""

    def __init__(self) -> None:
        self.findings = Findings("worlds", RULES)
        self._born: set[tuple[str, str, int]] = set()
        self._worlds: dict[tuple[int, str, int], dict[Who, Place]] = {}
        """(life, job, generation) -> members."""
        self._sizes: dict[tuple[int, str, int], int] = {}
        self._lives = Lives()
        self._heads: dict[str, tuple[int, tuple[Place, ...]]] = {}

    def lost(self, end: State) -> None:
        """Forget the worlds. The rule `restores/generations-rise` judges the first generation after the restore."""
        self._born.clear()
        self._heads.clear()

    def change(self, change: Change, before: State) -> None:
        self._lives.change(change)
        if change.restoring or change.unserved:
            for event in change.of(
                "world"
            ):  # a restore writes a world that is still forming, and so ends all earlier worlds
                self._heads[event.key.job] = (event.value or {}).get("generation", 0), ()
            return
        for event in change.events:
            kind = event.key.kind
            if kind == "worker" and not event.deleted:
                self._born.add((event.key.job, event.key.ids[0], event.create_revision))
            elif kind == "chunk":
                self._chunk(change, event, before)
            elif kind == "world" and not event.deleted:
                self._head(change, event, before)

    def _chunk(self, change: Change, event: Event, before: State) -> None:
        job, (generation, epoch, _index) = event.key.job, event.key.ids
        current = (before.value("world", job) or {}).get("generation", 0)
        if not event.deleted:
            self.findings.check(
                "chunks-stay",
                generation > current,
                f"{event.name} was written at revision {change.revision}, and the head of {job} was at"
                f" generation {current} already (epoch {epoch})",
                event.where,
            )

    def _head(self, change: Change, event: Event, before: State) -> None:
        check = self.findings.check
        job, head = event.key.job, event.value or {}
        generation, epoch = head.get("generation", 0), head.get("epoch", 0)
        last, old = self._heads.get(job, (0, ()))
        check(
            "one-by-one",
            generation == last + 1,
            f"job {job} went from generation {last} to {generation} at revision {change.revision}",
            event.where,
        )
        found: dict[int, Any] = {
            key.ids[2]: held.value
            for key, held in before.all("chunk", job)
            if key.ids[:2] == (generation, epoch)
        }
        found |= {
            e.key.ids[2]: e.value
            for e in change.of("chunk")
            if e.key.job == job and e.key.ids[:2] == (generation, epoch)
        }
        members = tuple(
            Place(m["worker"], m["incarnation"], m["group_rank"], m["slots"], m["first_rank"])
            for index in sorted(found)
            for m in (found[index] or {}).get("members", ())
        )
        size = sum(member.slots for member in members)
        stated = (head.get("chunks", 0), head.get("members"), head.get("size"))
        check(
            "whole",
            stated == (len(found), len(members), size),
            f"the head of {job} generation {generation} states {stated[0]} chunks, {stated[1]} members,"
            f" {stated[2]} ranks; there are {len(found)}, {len(members)} and {size}",
            event.where,
        )
        self._places(job, generation, members, event.where)
        if members and old:
            self._survivors(job, generation, old, members, event.where)
        self._restore(change, event, job, generation, head)
        self._heads[job] = (generation, members)
        self._worlds[change.life, job, generation] = {
            (member.worker, member.incarnation): member for member in members
        }
        self._sizes[change.life, job, generation] = size

    def _places(self, job: str, generation: int, members: tuple[Place, ...], where: Where) -> None:
        check = self.findings.check
        first = 0
        wrong = ""
        for index, member in enumerate(members):
            if (member.group_rank, member.first_rank) != (index, first):
                wrong = f"{member.worker} has group rank {member.group_rank} from rank {member.first_rank} on"
            first += member.slots
            check(
                "members-existed",
                (job, member.worker, member.incarnation) in self._born,
                f"generation {generation} of {job} has {member.worker} as incarnation"
                f" {member.incarnation}, which was never registered",
                where,
            )
        if len({member.worker for member in members}) != len(members):
            wrong = "a worker is there twice"
        if members:
            check("places", not wrong, f"in generation {generation} of {job} {wrong}", where)

    def _survivors(
        self, job: str, generation: int, old: tuple[Place, ...], new: tuple[Place, ...], where: Where
    ) -> None:
        now = {(member.worker, member.incarnation): member for member in new}
        for member in old:
            kept = now.get((member.worker, member.incarnation))
            if kept is not None and member.group_rank < len(new):
                self.findings.check(
                    "survivors-stay",
                    kept.group_rank == member.group_rank,
                    f"{member.worker} of {job} went from group rank {member.group_rank} to"
                    f" {kept.group_rank} in generation {generation}, which has {len(new)} members",
                    where,
                )

    def _restore(self, change: Change, event: Event, job: str, generation: int, head: dict[str, Any]) -> None:
        point = head.get("restore")
        restored = [
            (e.value or {}).get("step")
            for e in change.of("restored")
            if e.key == ("restored", job, (generation,))
        ]
        latest = [e.value or {} for e in change.of("latest") if e.key.job == job]
        if point is None and not restored and not latest:
            return
        expected = [] if point is None else [(generation, point["step"], point["attempt"])]
        got = [(one.get("generation"), one.get("step"), one.get("attempt")) for one in latest]
        self.findings.check(
            "restore-named",
            expected == got and restored == [step for _generation, step, _attempt in expected],
            f"the head of {job} generation {generation} restores {point}; its transaction wrote"
            f" restored {restored} and latest {got}",
            event.where,
        )

    def record(self, record: Record) -> None:
        if record.op not in {"member.join", "member.rejoin"} or record.outcome is not Outcome.OK:
            return
        reported = record.result
        key = self._lives.of(reported.get("uid")), record.args["job"], reported["generation"]
        place = self._worlds.get(key, {}).get((record.args["worker"], reported["incarnation"]))
        at = (place.first_rank, self._sizes[key]) if place is not None else None
        self.findings.check(
            "reported-places",
            at == (reported["rank"], reported["world_size"]),
            f"{record.client} received rank {reported['rank']} of {reported['world_size']} in generation"
            f" {reported['generation']} as incarnation {reported['incarnation']}; the world has {place}",
            record.where,
        )

    def finish(self, clock: Clock, end: State) -> None:
        """Do nothing: `change` and `record` have judged every rule."""
