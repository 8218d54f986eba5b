"""The judge: checks every revision of the store as it is written, and records violations.

The judge has its own view, which the store itself updates, and knows the client and the transaction of each revision.
Of the code under test it uses only `core.invariants`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from strata.core.invariants import check
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys, JobKeys
from strata.core.kv.records import (
    Ack,
    BarrierOutcome,
    BarrierResult,
    CheckpointRecord,
    CheckpointState,
    JobPhase,
    Latest,
    Phase,
    Seal,
    StopNotice,
    Worker,
    WorldHead,
    decode,
)
from strata.core.kv.txn import Event, Op, Target, Txn
from strata.core.kv.view import View
from strata.core.leadership.leader import leader_of
from strata.core.stop.last_step import STOP_BARRIER
from strata.core.stop.requests import act
from strata.testing.mvcc import Revision
from strata.testing.network import Call
from tests.sim.judges.deletions import AFTER_THE_COMMIT, burial_problems
from tests.sim.judges.notices import is_merged
from tests.sim.judges.stops import Stops
from tests.sim.judges.transactions import writes
from tests.sim.programs.ranks import RankRules
from tests.sim.programs.save_holds import Holds
from tests.sim.trace import Trace

CHECK_EVERY = 8
"""Revisions between two checks of all invariants, unless an event requires one sooner."""


@dataclass(slots=True)
class Violation:
    """One violation of the rules, and its time."""

    at_s: float
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s: {self.what}"


@dataclass(slots=True)
class Term:
    """One epoch: its instance, and when it began and ended."""

    instance: str
    began_s: float
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Death:
    """A deleted worker key, and the kind of transaction that deleted it."""

    worker: str
    record: Worker
    incarnation: int
    fenced: bool
    writer: str


Mourn = Callable[[Death], str | None]
"""Returns the problem of a death, or None."""


@dataclass(slots=True)
class Judge:
    """Subscribes to the store, and gets every call that took effect."""

    keys: ClusterKeys
    job: JobKeys
    trace: Trace
    mourn: Mourn
    timed_out: Callable[[BarrierOutcome, str], str | None]
    operated: bool = False
    """Whether an operator runs, who scales the job, pauses it and requests stops."""
    kept: bool = False
    """Whether checkpoint maintenance runs: checkpoints are deleted, read, copied, reported as damaged."""
    saves_first: bool = False
    stops: Stops = field(default_factory=Stops)
    holds: Holds = field(default_factory=Holds)
    ranks: RankRules = field(default_factory=RankRules)
    buried: set[tuple[int, int, str]] = field(default_factory=set)
    """Commits that were legally marked for deletion or as damaged: (step, generation, attempt)."""
    view: View = field(default_factory=View)
    violations: list[Violation] = field(default_factory=list)
    terms: dict[int, Term] = field(default_factory=dict)
    acks: dict[str, bytes] = field(default_factory=dict)
    """Every ack that was ever written, by its key."""
    _unclaimed: list[tuple[Revision, dict[str, tuple[bytes, int] | None]]] = field(default_factory=list)
    _unchecked: int = 0

    def wrong(self, what: str) -> None:
        """Record a violation."""
        self.violations.append(Violation(self.trace.now_s, what))
        self.trace.note("judge", f"VIOLATION {what}")

    # -- writes

    def seen(self, written: Revision) -> None:
        """Take a revision.

        Afterwards `applied` reports its writer, unless the revision came from the end of a lease.
        """
        self._settle_unclaimed()
        before: dict[str, tuple[bytes, int] | None] = {}
        for event in written.events:
            old = self.view.get(event.kv.key)
            before[event.kv.key] = None if old is None else (old.value, old.create_revision)
        self.view.apply(written.number, written.events)
        self._unclaimed.append((written, before))

    def applied(self, call: Call) -> None:
        """Note that a call took effect or was refused.

        The call is the writer of the pending revision if its transaction can have made the revision. A pending
        revision that the call's transaction cannot have made came from the end of a lease just before.
        """
        txn = call.argument if isinstance(call.argument, Txn) else None
        if txn is not None and self._unclaimed and not writes(txn, self._unclaimed[-1][0]):
            self._settle_unclaimed()
        elif self._unclaimed and (txn is not None or call.kind == "revoke"):
            self._claimed(call.client, txn)

    def _settle_unclaimed(self) -> None:
        if self._unclaimed:
            self._claimed("etcd", None)

    def settle(self) -> None:
        """Judge the revisions without a writer, at the end."""
        self._settle_unclaimed()
        self._check_all()

    def _claimed(self, writer: str, txn: Txn | None) -> None:
        unclaimed, self._unclaimed = self._unclaimed, []
        epoch = self._fence_of(txn)
        for written, before in unclaimed:
            names = []
            for event in written.events:
                short = event.kv.key.removeprefix(self.keys.root)
                names.append(f"-{short}" if event.deleted else short)
            self.trace.note(writer, f"rev {written.number} {' '.join(names)}")
            deposes = any(event.deleted and event.kv.key == self.keys.leader for event in written.events)
            if epoch is not None and not deposes:
                self._judge_epoch(writer, epoch)
            for event in written.events:
                self._judge(event, before[event.kv.key], writer, epoch)
            self._unchecked += 1
            structural = any(
                "/world" in event.kv.key or "/latest" in event.kv.key for event in written.events
            )
            if structural or self._unchecked >= CHECK_EVERY:
                self._check_all()

    def _check_all(self) -> None:
        self._unchecked = 0
        for problem in check(self.view, self.keys):
            self.wrong(problem)

    # -- leadership

    def _fence_of(self, txn: Txn | None) -> int | None:
        """Return the epoch that a transaction is fenced by, or None."""
        for compare in txn.compares if txn is not None else ():
            if (
                compare.key == self.keys.leader
                and compare.target is Target.CREATE
                and compare.op is Op.EQUAL
                and isinstance(compare.operand, int)
            ):
                return compare.operand
        return None

    def _judge_epoch(self, writer: str, epoch: int) -> None:
        term = self.terms.get(epoch)
        if term is None:
            self.wrong(f"{writer} wrote in epoch {epoch}, which never was")
        elif term.ended_s is not None:
            self.wrong(f"{writer} wrote in epoch {epoch}, which had ended")
        elif term.instance != writer:
            self.wrong(f"{writer} wrote in epoch {epoch}, which is that of {term.instance}")

    def _judge_leader(self, event: Event) -> None:
        if event.deleted:
            for epoch, term in self.terms.items():
                if term.ended_s is None:
                    term.ended_s = self.trace.now_s
                    self.trace.count("leadership ended")
                    self.trace.note("judge", f"epoch {epoch} ended")
            return
        if event.kv.version != 1:
            self.wrong("the leader key was overwritten")
        held = leader_of(self.view, self.keys)
        assert held is not None
        self.terms[event.kv.create_revision] = Term(held.record.instance, self.trace.now_s)
        self.trace.count("elections")

    # -- one event

    def _judge(self, event: Event, before: tuple[bytes, int] | None, writer: str, epoch: int | None) -> None:
        match self.keys.parts(event.kv.key):
            case ("leader",):
                self._judge_leader(event)
            case ("uid",):
                if event.deleted or event.kv.version != 1:
                    self.wrong("the cluster's uid was overwritten")
            case ("jobs", _, *rest):
                self._judge_world(event, rest, before, writer, epoch)
                self._judge_members(event, rest, before, writer, epoch)
            case _:
                pass

    def _judge_world(
        self, event: Event, rest: list[str], before: tuple[bytes, int] | None, writer: str, epoch: int | None
    ) -> None:
        """Judge keys that only the leader writes."""
        match rest:
            case ["world" | "standbys" as name]:
                self._only_fenced(event, epoch, writer)
                if name == "world" and not event.deleted:
                    self._judge_head(event, before)
            case ["worlds", _, chunk_epoch, "members", _] if not event.deleted:
                self._only_fenced(event, epoch, writer)
                if epoch is not None and int(chunk_epoch) != epoch:
                    self.wrong(f"{event.kv.key} was written in epoch {epoch}")
                if event.kv.version != 1:
                    self.wrong(f"{event.kv.key} was overwritten")
            case ["worlds", _, _, "members", _]:
                self._only_fenced(event, epoch, writer)
            case ["history", _]:
                self._only_fenced(event, epoch, writer)
            case ["worlds" | "barriers", *_] if event.deleted and self._is_of_old(rest):
                self._only_fenced(event, epoch, writer)
            case ["phase"] if not event.deleted:
                phase = decode(JobPhase, event.kv.value).phase
                self.trace.count(f"phase {phase.value}")
                if phase in {Phase.DONE, Phase.FAILED}:
                    self._only_fenced(event, epoch, writer)
                if phase is not Phase.RUNNING and not (phase is Phase.PAUSED and self.operated):
                    self.wrong(f"the job ended: {event.kv.value!r}")
            case _:
                pass

    def _judge_members(
        self, event: Event, rest: list[str], before: tuple[bytes, int] | None, writer: str, epoch: int | None
    ) -> None:
        """Judge keys that any replica writes for members."""
        match rest:
            case ["worlds", generation, "notice"] if not event.deleted:
                self._judge_notice(event, int(generation), before, epoch)
            case ["worlds", generation, "held"] if not event.deleted:
                self.trace.count("generations that could not save")
                if why := self.holds.key(JobView(self.view, self.job), int(generation), event.kv):
                    self.wrong(why)
            case ["worlds", generation, "stopped", _] if not event.deleted:
                self.trace.count("ranks that stopped")
                if event.kv.version != 1 or int(generation) != self._generation():
                    self.wrong(f"{event.kv.key} was written again, or in generation {self._generation()}")
            case ["workers", worker]:
                self._judge_worker(event, worker, before, writer, fenced=epoch is not None)
            case ["barriers", _, generation, _, "outcome"] if not event.deleted:
                self._judge_outcome(event, int(generation))
            case ["checkpoints", _, _]:
                self._judge_record(event, before)
            case ["checkpoints", _, _, _, "acks", _]:
                self._judge_ack(event)
            case ["latest"]:
                self._judge_latest(event, before)
            case _:
                pass

    def _only_fenced(self, event: Event, epoch: int | None, writer: str) -> None:
        if epoch is None:
            self.wrong(f"{writer} {'deleted' if event.deleted else 'wrote'} {event.kv.key} without a fence")

    def _is_of_old(self, rest: list[str]) -> bool:
        """Return whether a key is of an ended generation: then only the leader may remove the key."""
        return int(rest[1] if rest[0] == "worlds" else rest[2]) < self._generation()

    def _generation(self) -> int:
        head = JobView(self.view, self.job).head()
        return head.record.generation if head is not None else 0

    def _judge_head(self, event: Event, before: tuple[bytes, int] | None) -> None:
        head = decode(WorldHead, event.kv.value)
        last = decode(WorldHead, before[0]).generation if before is not None else 0
        leader = leader_of(self.view, self.keys)
        if head.generation != last + 1:
            self.wrong(f"generation {head.generation} came after {last}")
        if leader is None or head.epoch != leader.create_revision:
            self.wrong(f"generation {head.generation} is of epoch {head.epoch}, which does not lead")
        self.trace.count("forming generations" if head.forming else "generations")
        if head.restore is not None:
            self.trace.count("restores")
        committed = [
            e.record
            for e in JobView(self.view, self.job).checkpoints()
            if e.record.state is CheckpointState.COMMITTED
        ]
        if committed and head.restore is None and not head.forming:
            self.wrong(f"generation {head.generation} restores nothing, and there are commits")

        job = JobView(self.view, self.job)
        spec = job.spec()
        assert spec is not None
        if (
            before is not None
            and (why := self.holds.head(job, decode(WorldHead, before[0]), head)) is not None
        ):
            self.wrong(why)
        if (why := self.stops.head(job, self.trace.now_s)) is not None:
            self.wrong(why)
        if head.members > spec.record.max_workers or 0 < head.members < spec.record.min_workers:
            self.wrong(f"generation {head.generation} has {head.members} members; the spec is {spec.record}")
        if job.phase() is not Phase.RUNNING and not head.forming:
            self.wrong(f"generation {head.generation} has members, and the job is {job.phase().value}")

    def _judge_notice(
        self, event: Event, generation: int, before: tuple[bytes, int] | None, epoch: int | None
    ) -> None:
        """Judge a notice: it must be of the current generation, and as urgent and wide as the previous one, or more."""
        notice = decode(StopNotice, event.kv.value)
        scales = not notice.has_deadline
        self.trace.count(f"notices to {act(notice)}")
        self.stops.stop_requested(generation, self.trace.now_s)
        if generation != self._generation():
            self.wrong(f"{event.kv.key} was written in generation {self._generation()}")
        if scales and epoch is None:
            self.wrong(f"{event.kv.key}: only the leader asks ranks to scale")
        if not self.operated and not scales:
            self.wrong(f"{event.kv.key}: nobody asked for it")
        if before is None:
            return
        old = decode(StopNotice, before[0])
        if not is_merged(old, notice):
            self.wrong(f"{event.kv.key} went from {old} to {notice}")

    def _judge_worker(
        self, event: Event, worker: str, before: tuple[bytes, int] | None, writer: str, *, fenced: bool
    ) -> None:
        if event.deleted:
            assert before is not None
            record = decode(Worker, before[0])
            self.trace.count("members removed")
            wrong = self.mourn(Death(worker, record, before[1], fenced, writer))
            if wrong is not None:
                self.wrong(wrong)
            return
        record = decode(Worker, event.kv.value)
        if before is None:
            self.trace.count("registrations")
            return
        old = decode(Worker, before[0])
        if old.boot != record.boot:
            self.wrong(f"{worker}: boot {record.boot} overwrote {old.boot}, which was registered")
        if old.served_by != record.served_by:
            self.trace.count("hand-overs")

    def _judge_outcome(self, event: Event, generation: int) -> None:
        key, outcome = event.kv.key, decode(BarrierOutcome, event.kv.value)
        self.trace.count(f"barriers {outcome.result.value}")
        if event.kv.version != 1:
            self.wrong(f"{key} was overwritten")
        if generation != self._generation():
            self.wrong(f"{key} was written in generation {self._generation()}")
        if outcome.result is BarrierResult.BROKEN and not self.has_loss(generation):
            self.wrong(f"{key} broke, and nobody had gone: {outcome.reason}")
        if outcome.result is BarrierResult.TIMED_OUT and (wrong := self.timed_out(outcome, key)):
            self.wrong(wrong)
        if f"/{STOP_BARRIER}/" in key and (wrong := self.stops.outcome(generation, outcome)):
            self.wrong(wrong)

    def has_loss(self, generation: int) -> bool:
        """Return whether a member of the current world departed or a rank ended: the world is about to end."""
        job = JobView(self.view, self.job)
        world = job.world()
        if world is None:
            return False
        if job.failed(generation) or job.done(generation) or job.stopped(generation):
            return True
        alive = {(w.name, w.create_revision) for w in job.workers()}
        return any((member.worker, member.incarnation) not in alive for member in world.members)

    # -- checkpoints

    def _judge_record(self, event: Event, before: tuple[bytes, int] | None) -> None:
        old = decode(CheckpointRecord, before[0]) if before is not None else None
        if event.deleted:
            if old is None or old.state is not CheckpointState.DELETING:
                self.wrong(f"{event.kv.key} went without a tombstone")
            self.trace.count("checkpoints gone")
            return
        new = decode(CheckpointRecord, event.kv.value)
        self.trace.count(f"checkpoints {new.state.value}")
        was = old.state if old is not None else None
        legal = {
            (None, CheckpointState.OPEN),
            (CheckpointState.OPEN, CheckpointState.COMMITTED),
            (CheckpointState.OPEN, CheckpointState.ABORTED),
            (CheckpointState.ABORTED, CheckpointState.OPEN),
        }
        if self.kept:
            legal |= AFTER_THE_COMMIT
            self._judge_maintenance(event.kv.key, old, new)
        if (was, new.state) not in legal:
            self.wrong(f"{event.kv.key} went from {was} to {new.state}")
        alive = new.state in {CheckpointState.OPEN, CheckpointState.COMMITTED}
        fresh = new.state is not was
        if alive and fresh and new.generation != self._generation():
            self.wrong(f"{event.kv.key} became {new.state} in generation {self._generation()}")
        if old is not None and old.attempt != new.attempt and was is CheckpointState.OPEN:
            self.wrong(f"{event.kv.key}: attempt {old.attempt} was open, {new.attempt} took its place")
        if new.state is CheckpointState.COMMITTED and fresh:
            acks = self.job.acks(new.step, new.generation, new.attempt)
            there = set(self.view.names(acks))
            if len(there) != new.ranks + 1 or "seal" not in there:
                self.wrong(f"{event.kv.key} was committed with the acks {sorted(there)} of {new.ranks} ranks")

    def _judge_maintenance(self, key: str, old: CheckpointRecord | None, new: CheckpointRecord) -> None:
        for problem in burial_problems(self.view, self.job, old, new):
            self.wrong(f"{key}: {problem}")
        if new.state in {CheckpointState.DELETING, CheckpointState.CORRUPT}:
            self.buried.add((new.step, new.generation, new.attempt))

    def _judge_ack(self, event: Event) -> None:
        _, _, _, step, generation, attempt, _, rank = self.keys.parts(event.kv.key)
        job = JobView(self.view, self.job)
        record = job.checkpoint(int(step), int(generation))
        if event.deleted:
            is_open = record is not None and record.record.state is CheckpointState.OPEN
            if is_open and record is not None and record.record.attempt == attempt:
                self.wrong(f"{event.kv.key} was lost")
            return
        self.trace.count("acks")
        if event.kv.version != 1:
            self.wrong(f"{event.kv.key} was overwritten")
        if int(generation) != self._generation():
            self.wrong(f"{event.kv.key} was written in generation {self._generation()}")
        if (
            record is None
            or record.record.state is not CheckpointState.OPEN
            or record.record.attempt != attempt
        ):
            self.wrong(f"{event.kv.key} acks what is not open")
        ack: Ack | Seal = decode(Seal, event.kv.value) if rank == "seal" else decode(Ack, event.kv.value)
        held = job.worker(ack.worker)
        if held is None or held.create_revision != ack.incarnation:
            self.wrong(f"{event.kv.key} is of incarnation {ack.incarnation} of {ack.worker}, which is gone")
        self.acks[event.kv.key] = event.kv.value

    def _judge_latest(self, event: Event, before: tuple[bytes, int] | None) -> None:
        if event.deleted:
            self.wrong("latest was deleted")
            return
        new = decode(Latest, event.kv.value)
        if before is not None:
            old = decode(Latest, before[0])
            if (new.generation, new.step) < (old.generation, old.step):
                self.wrong(
                    f"latest went back from {(old.generation, old.step)} to {(new.generation, new.step)}"
                )

    # -- states that last

    def stuck(self) -> Iterator[str]:
        """Yield the saves that are complete and not committed: a replica should have committed them."""
        job = JobView(self.view, self.job)
        for entry in job.checkpoints():
            record = entry.record
            if record.state is CheckpointState.OPEN and record.generation == self._generation():
                names = self.view.names(self.job.acks(record.step, record.generation, record.attempt))
                if len(names) == record.ranks + 1:
                    yield f"step {record.step} of generation {record.generation} is complete and still open"
