"""Checks the checkpoint catalog: commits are complete and permanent, and `latest` never goes back (PROTOCOLS 8)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from strata_chaos.checkers.findings import Findings
from strata_chaos.checkers.images import problem_of
from strata_chaos.checkers.truth import Change, Clock, Event, Held, Lives, State
from strata_chaos.history import Outcome, Record, Where

RULES: Final = {
    "transitions": "a record is opened; then committed or aborted; committed turns only corrupt or deleting",
    "complete": "at a commit every rank's ack and the seal exist, and the seal's digest is the record's",
    "current": "a commit happens in its record's generation",
    "acks-once": "an ack and a seal are created once, while their attempt is open",
    "latest-order": "latest only grows, by generation and step, and names a committed record",
    "latest-kept": "no record is tombstoned while latest names it",
    "committed-stays": "a commit that a client received had happened by then, and stays",
    "restore-exact": "a restore returned the bytes that this rank number saved, in that step and generation",
    "restore-point": "a restore began from the checkpoint that the head of its generation names",
    "latest-monotonic": "a reader that requests the latest checkpoint never receives an older one than before",
    "on-disk": "at the end every committed checkpoint is on disk, marked, and every byte is as recorded",
}

_NEXT: Final[dict[str | None, frozenset[str | None]]] = {
    None: frozenset({"open", "prepared"}),
    "open": frozenset({"committed", "aborted"}),
    "committed": frozenset({"corrupt", "deleting"}),
    "aborted": frozenset({"open", "deleting"}),
    "corrupt": frozenset({"deleting"}),
    "prepared": frozenset({"deleting", "committed"}),
    "deleting": frozenset({None}),
}


class Catalog:
    """The catalog checker; its rules are in `RULES`."""

    def __init__(self) -> None:
        self.findings = Findings("catalog", RULES)
        self._committed: dict[tuple[str, str], tuple[int, Where]] = {}
        """(job, attempt) -> revision and line of the commit."""
        self._points: dict[tuple[int, str, int], Any] = {}
        """(life, job, generation) -> restore point in the head."""
        self._lives = Lives()
        self._saved: dict[tuple[str, int, int, int], set[str]] = defaultdict(set)
        """(job, generation, step, rank) -> sha256 of all data that clients saved there."""
        self._reported: dict[tuple[str, str, str], tuple[float, Where]] = {}
        """(job, attempt, client) -> when this client first got the report that the attempt is committed."""
        self._restored: list[Record] = []
        self._newest: dict[tuple[str, int], tuple[int, int]] = {}

    # -- etcd

    def lost(self, end: State) -> None:
        """Keep all commits: the rule `restores/committed-kept` judges whether they exist after the restore."""

    def change(self, change: Change, before: State) -> None:
        self._lives.change(change)
        if change.restoring:
            self._restored_change(change)
        if change.restoring or change.unserved:
            return
        for event in change.events:
            match event.key.kind:
                case "record":
                    self._record_event(change, event, before)
                case "ack" | "seal" if not event.deleted:
                    self._ack(event, before)
                case "latest" if not event.deleted:
                    self._latest(change, event, before)
                case "world" if not event.deleted:
                    head = event.value or {}
                    self._points[change.life, event.key.job, head.get("generation", 0)] = head.get("restore")

    def _restored_change(self, change: Change) -> None:
        """Count records that a restore adopts as committed at this change, unless they were committed before."""
        for event in change.of("record"):
            value = event.value or {}
            if value.get("state") == "committed":
                key = event.key.job, str(value.get("attempt"))
                self._committed.setdefault(key, (change.at, event.where))

    def _record_event(self, change: Change, event: Event, before: State) -> None:
        old = (event.before.value or {}) if event.before is not None else {}
        new = event.value or {}
        was, now = old.get("state"), None if event.deleted else new.get("state")
        job, (step, generation) = event.key.job, event.key.ids
        what = f"step {step} of generation {generation} of {job}"
        same = old.get("attempt") == new.get("attempt")
        fine = now in _NEXT.get(was, frozenset())
        if was is not None and now is not None:
            fine = fine and same is not (was == "aborted" and now == "open")
        self.findings.check(
            "transitions",
            fine,
            f"{what} went from {was or 'nothing'} to {now or 'nothing'} at revision {change.revision}"
            + ("" if same or not old or not new else f", from attempt {old.get('attempt')} to another"),
            event.where,
        )
        if now == "committed" and was != "committed":
            self._commit(change, event, new, before)
        elif now == "deleting":
            latest = before.value("latest", job) or {}
            self.findings.check(
                "latest-kept",
                (latest.get("step"), latest.get("attempt")) != (step, old.get("attempt")),
                f"{what} was tombstoned at revision {change.revision}, while it was the latest",
                event.where,
            )

    def _commit(self, change: Change, event: Event, record: dict[str, Any], before: State) -> None:
        check = self.findings.check
        job, (step, generation) = event.key.job, event.key.ids
        attempt = str(record.get("attempt"))
        what = f"step {step} of generation {generation} of {job} (attempt {attempt})"
        here = {e.key: e.value for e in change.events if e.key.kind in {"ack", "seal"} and not e.deleted}

        def there(kind: str, *ids: Any) -> dict[str, Any] | None:
            found = before.get(kind, job, *ids)
            return found.value if found is not None else here.get((kind, job, ids))  # type: ignore[call-overload]  # a Key is a tuple

        ranks = record.get("ranks", 0)
        missing = [r for r in range(ranks) if there("ack", step, generation, attempt, r) is None]
        seal = there("seal", step, generation, attempt)
        sealed = seal is not None and seal.get("digest") == record.get("manifest_digest")
        check(
            "complete",
            ranks > 0 and not missing and sealed,
            f"{what} was committed at revision {change.revision} "
            + (f"without the acks of ranks {missing}" if missing else "without a seal of its digest"),
            event.where,
        )
        current = (before.value("world", job) or {}).get("generation")
        check(
            "current",
            current == generation,
            f"{what} was committed at revision {change.revision}, when the world was at generation {current}",
            event.where,
        )
        self._committed[job, attempt] = change.at, event.where

    def _ack(self, event: Event, before: State) -> None:
        job, (step, generation, attempt, *_rank) = event.key.job, event.key.ids
        record = before.value("record", job, step, generation) or {}
        open_ = (record.get("state"), record.get("attempt")) == ("open", attempt)
        self.findings.check(
            "acks-once",
            event.before is None and open_,
            f"{event.name} was "
            + (
                "written again"
                if event.before is not None
                else f"written while its record was {record.get('state', 'absent')}"
                + ("" if record.get("attempt") in {attempt, None} else " of another attempt")
            ),
            event.where,
        )

    def _latest(self, change: Change, event: Event, before: State) -> None:
        new = event.value or {}
        old = (event.before.value or {}) if event.before is not None else {}
        job = event.key.job
        order = new.get("generation", 0), new.get("step", 0)
        last = old.get("generation", 0), old.get("step", 0)
        where = new.get("step"), new.get("record_generation")
        named = [e.value for e in change.of("record") if e.key == ("record", job, where)]
        record = named[0] if named else before.value("record", job, *where)
        fits = (
            record is not None
            and record.get("attempt") == new.get("attempt")
            and record.get("state") == "committed"
        )
        self.findings.check(
            "latest-order",
            order > last and fits,
            f"latest of {job} went from {last} to {order} at revision {change.revision}"
            + ("" if fits else ", which names no committed record"),
            event.where,
        )

    # -- clients

    def record(self, record: Record) -> None:
        match record.op:
            case "checkpoint.save":
                args = record.args
                slot = args["job"], args["generation"], args["step"], args["rank"]
                self._saved[slot].add(args["digest"])
                if record.outcome is Outcome.OK and record.t1 is not None and record.result.get("committed"):
                    self._note_reported(record, record.t1)
            case "checkpoint.restore" if record.outcome is Outcome.OK:
                self._restored.append(record)
            case "checkpoint.latest" if record.outcome is Outcome.OK:
                self._latest_reported(record)

    def _latest_reported(self, record: Record) -> None:
        reported = record.result["generation"], record.result["step"]
        reader = record.client, record.process
        last = self._newest.get(reader, (0, 0))
        self.findings.check(
            "latest-monotonic",
            reported >= last,
            f"{record.client} received {reported} as the latest (generation, step), after {last}",
            record.where,
        )
        self._newest[reader] = max(reported, last)
        self._note_reported(record, record.t0 if record.t1 is None else record.t1)

    def _note_reported(self, record: Record, reported_t: float) -> None:
        key = record.args["job"], record.result["attempt"], record.client
        if reported_t <= self._reported.get(key, (reported_t, record.where))[0]:
            self._reported[key] = reported_t, record.where

    # -- end of the run

    def finish(self, clock: Clock, end: State) -> None:
        for (job, attempt, client), (reported_t, where) in self._reported.items():
            commit = self._committed.get((job, attempt))
            self.findings.check(
                "committed-stays",
                commit is not None and clock.not_before(commit[0]) <= reported_t,
                f"{client} received a commit of attempt {attempt} of {job}; "
                + ("there was none" if commit is None else f"it happened later, at revision {commit[0]}"),
                where,
                *(() if commit is None else (commit[1],)),
            )
        for record in self._restored:
            self._restore(record)
        reported = {(job, attempt) for job, attempt, _client in self._reported}
        for key, held in end.all("record"):
            self._disk(key.job, held, reported)

    def _restore(self, record: Record) -> None:
        args, point = record.args, record.args["point"]
        key = self._lives.of(args.get("uid")), args["job"], args["generation"]
        if key in self._points:
            expected = self._points[key]
            self.findings.check(
                "restore-point",
                expected == point,
                f"{record.client} restored {point} in generation {args['generation']}, whose head names {expected}",
                record.where,
            )
        if point is None:
            return
        slot = args["job"], point["record_generation"], point["step"], args["rank"]
        saved = self._saved.get(slot)
        if saved is None:
            return  # the world that saved the checkpoint had no such rank, or the rank recorded nothing
        self.findings.check(
            "restore-exact",
            record.result["digest"] in saved,
            f"{record.client} restored step {point['step']} of generation {point['record_generation']} as rank"
            f" {args['rank']} and got {record.result['digest'][:16]}…, which no rank saved there",
            record.where,
        )

    def _disk(self, job: str, held: Held, reported: set[tuple[str, str]]) -> None:
        value = held.value or {}
        path = urlsplit(str(value.get("path", "")))
        folder = Path(unquote(path.path))
        if value.get("state") != "committed" or path.scheme != "file" or not folder.parent.is_dir():
            return  # this process cannot read the checkpoint: it is on another machine, or in an object store
        attempt = str(value.get("attempt"))
        problem = problem_of(folder, str(value.get("manifest_digest")), marked=(job, attempt) in reported)
        commit = self._committed.get((job, attempt))
        self.findings.check(
            "on-disk",
            not problem,
            f"step {value.get('step')} of {job} (attempt {attempt}) is committed, and {problem}",
            *(() if commit is None else (commit[1],)),
        )
