"""Ranks, replicas, a leader and operators, each with a lagging view, interleaved at every write."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.core.checkpoints.lifecycle import (
    AckRequest,
    Author,
    BeginRequest,
    SealRequest,
    acked,
    complete,
    decide_abort,
    decide_ack,
    decide_begin,
    decide_close,
    decide_commit,
    decide_delete,
    decide_pin,
    decide_seal,
    decide_unpin,
    is_latest,
)
from strata.core.ids import AttemptId
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState, CheckpointType
from strata.core.kv.txn import Decision, Txn
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import ROOT, Job
from tests.unit.core.rig import JOB, Observer, author_of, carry_out, leave, register

STEPS = (20, 40, 60)


@dataclass
class History:
    """Commits and acks seen so far, compared with each new state."""

    committed: dict[tuple[int, int], str] = field(default_factory=dict)
    latest: tuple[int, int] = (0, 0)
    acks_at_abort: dict[str, int] = field(default_factory=dict)

    def check(self, before: JobView, after: JobView) -> None:
        for entry in after.checkpoints():
            self._check_record(before, after, entry.record)
        latest = after.latest()
        if latest is not None:
            now = latest.record.generation, latest.record.step
            assert now >= self.latest, "latest went back"
            self.latest = now

    def _check_record(self, before: JobView, after: JobView, record: CheckpointRecord) -> None:
        slot = record.step, record.generation
        if record.state is CheckpointState.COMMITTED:
            assert self.committed.setdefault(slot, record.attempt) == record.attempt
            assert complete(after, record), "committed without every ack and the seal"
        if record.state is CheckpointState.ABORTED:
            count = self.acks_at_abort.setdefault(record.attempt, len(acked(after, record)))
            assert len(acked(after, record)) == count, "acked after the abort"
        was = before.checkpoint(*slot)
        becomes_tombstone = was is not None and was.record.state is not CheckpointState.DELETING
        if record.state is CheckpointState.DELETING and becomes_tombstone:
            assert not is_latest(before, record)
            assert before.view.get(JOB.pin(record.step, record.attempt)) is None


class Race(Job):
    """A job whose writes are decided on lagging views and arrive late, in any order."""

    def __init__(self) -> None:
        super().__init__(a=2, b=1)
        self.observers = [Observer(self.store) for _ in range(3)]
        self.under_way: list[Txn] = []
        self.history = History()
        self.attempts = 0
        self.authors: list[Author] = []

    def take(self, decision: Decision) -> None:
        if decision.txn is not None:
            self.under_way.append(decision.txn)

    def arrive(self, index: int) -> None:
        if self.under_way:
            before = self.store.job()
            self.store.execute(self.under_way.pop(index % len(self.under_way)))
            self.history.check(before, self.store.job())

    def author_of(self, job: JobView, rank: int) -> Author | None:
        world = job.world()
        if world is None or world.head.forming:
            return None
        return author_of(job, rank)

    def rank_acts(self, job: JobView, rank: int, step: int, what: str, variant: int) -> None:
        author = self.author_of(job, rank)
        if author is None:
            return
        held = job.checkpoint(step, author.generation)
        attempt = held.record.attempt if held is not None else "none"
        if what == "begin":
            self.attempts += 1
            request = BeginRequest(
                author=author,
                step=step,
                type=CheckpointType.FULL,
                root=ROOT,
                attempt=AttemptId(f"x{self.attempts}"),
                replaces=attempt,
            )
            self.take(decide_begin(job, request, now_unix_ms=0))
        elif what == "ack":
            digest = f"d{rank}" if variant < 9 else "other"
            ack = AckRequest(author=author, step=step, attempt=attempt, digest=digest, size_bytes=1)
            self.take(decide_ack(job, ack))
        elif what == "seal":
            seal = SealRequest(author=author, step=step, attempt=attempt, digest="m", size_bytes=3)
            self.take(decide_seal(job, seal))
        else:
            self.take(decide_abort(job, author=author, step=step, attempt=attempt, reason="r"))

    def complete(self, step: int) -> None:
        """Bring a save up to its commit, which any replica may write later."""
        author = not_none(self.author_of(self.store.job(), 0))
        held = self.store.job().checkpoint(step, author.generation)
        latest = self.store.job().latest()
        removed_by = latest is not None and (author.generation, step) < (
            latest.record.generation,
            latest.record.step,
        )
        if removed_by or (held is not None and held.record.state is not CheckpointState.OPEN):
            return
        self.attempts += 1
        before = self.store.job()
        record = self.begin(0, step, f"x{self.attempts}")
        for rank in range(3):
            if rank not in acked(self.store.job(), record):
                self.ack(rank, step, record.attempt)
        if not complete(self.store.job(), record):
            self.seal(step, record.attempt)
        self.history.check(before, self.store.job())

    def others_act(self, job: JobView, step: int, what: str) -> None:
        records = [e for e in job.checkpoints() if e.record.step == step]
        for entry in records:
            attempt = entry.record.attempt
            if what == "commit":
                self.take(decide_commit(job, entry))
            elif what == "delete":
                self.take(decide_delete(job, step=step, attempt=attempt, finished=False))
            elif what == "deleted":
                self.take(decide_delete(job, step=step, attempt=attempt, finished=True))
            elif what == "pin":
                self.take(decide_pin(job, step=step, attempt=attempt, who="me", why=""))
            else:
                self.take(decide_unpin(job, step=step, attempt=attempt))

    def new_world(self) -> None:
        """End the generation while transactions decided in it are still on their way."""
        leave(self.store, "b")
        register(self.store, "b")
        head = not_none(self.store.job().head())
        before = self.store.job()
        self.store.settle(
            lambda job: decide_close(job, through_generation=head.record.generation, reason="new world")
        )
        carry_out(self.store, self.epoch, settled=True)
        self.history.check(before, self.store.job())


_RANK = st.tuples(
    st.sampled_from(["begin", "ack", "ack", "ack", "seal", "abort"]),
    st.integers(0, 2),
    st.sampled_from(STEPS),
    st.integers(0, 9),
)
_OTHER = st.tuples(
    st.sampled_from(["commit", "commit", "delete", "deleted", "pin", "unpin"]), st.sampled_from(STEPS)
)
_WHOLE = st.tuples(st.just("complete"), st.sampled_from(STEPS))
_EVENT = st.one_of(_RANK, _RANK, _OTHER, _OTHER, _WHOLE, st.just(("world",)), st.just(("close",)))


@settings(
    max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None
)
@given(
    events=st.lists(
        st.tuples(_EVENT, st.integers(0, 2), st.integers(0, 6), st.booleans(), st.integers(0, 5)),
        min_size=20,
        max_size=50,
    )
)
def test_no_interleaving_breaks_an_invariant(
    events: list[tuple[tuple[object, ...], int, int, bool, int]],
) -> None:
    race = Race()
    for event, actor, lag, arrives, index in events:
        observer = race.observers[actor]
        observer.catch_up(max(observer.view.revision, race.store.revision - lag))
        match event:
            case ("world",):
                race.new_world()
            case ("close",):
                through = not_none(observer.job.head()).record.generation - 1
                race.take(decide_close(observer.job, through_generation=through, reason="r"))
            case (str(what), int(rank), int(step), int(variant)):
                race.rank_acts(observer.job, rank, step, what, variant)
            case ("complete", int(step)):
                race.complete(step)
            case (str(what), int(step)):
                race.others_act(observer.job, step, what)
        if arrives:
            race.arrive(index)
    while race.under_way:
        race.arrive(0)
    assert race.store.problems() == []


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(8)), rank=st.integers(0, 2))
def test_some_view_commits_in_any_order_of_the_last_acks(order: list[int], rank: int) -> None:
    """The two last acks come through two replicas.

    Each replica decides on its own view, and again after every change.
    """
    job = Job(a=2, b=1)
    job.begin()
    job.ack(rank)
    replicas = [Observer(job.store) for _ in range(2)]
    for number in order:
        if number < 3:
            job.ack(number)
        else:
            commits(replicas[number % 2])
    job.seal()
    for replica in replicas:
        commits(replica)
    (entry,) = job.store.job().checkpoints()
    assert entry.record.state is CheckpointState.COMMITTED


def commits(replica: Observer) -> None:
    """Let a replica catch up and commit all complete saves, as each replica does on a change."""
    replica.catch_up()
    for entry in replica.job.checkpoints():
        if (txn := decide_commit(replica.job, entry).txn) is not None:
            replica.store.execute(txn)
