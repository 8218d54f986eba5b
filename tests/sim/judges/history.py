"""The clients' history: operations of members and their results, and the rules for results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import BarrierOutcome, CheckpointState
from strata.errors import (
    CheckpointAborted,
    CheckpointNotFound,
    StaleGeneration,
    StrataError,
)
from strata.v1 import barriers_pb2
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED
from tests.sim.judges.judge import Judge
from tests.sim.judges.samples import Samples

Round = tuple[str, int, int]
"""Name, generation, round."""


@dataclass(slots=True)
class Meeting:
    """One round of one barrier, as its participants saw it."""

    arrived_s: dict[int, float] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)
    timeout_s: float | None = None
    reported: tuple[int, barriers_pb2.BarrierOutcome] | None = None
    """The first participant that got an outcome, and that outcome."""


@dataclass(slots=True)
class History:
    """Judges the clients' side of a run."""

    judge: Judge
    keys: ClusterKeys
    now_s: Callable[[], float]
    meetings: dict[Round, Meeting] = field(default_factory=dict)
    begun: dict[tuple[int, int, str], float] = field(default_factory=dict)
    """(step, generation, attempt) -> when a rank first got that attempt of a save."""
    acked: int = 0
    committed: dict[tuple[int, int, str], str] = field(default_factory=dict)
    released: int = 0
    samples: Samples = field(default_factory=Samples)

    def _acts(self, what: str) -> None:
        if (why := self.judge.ranks.acts(what)) is not None:
            self.judge.wrong(why)

    # -- barriers

    def arrive(self, key: Round, rank: int, payload: bytes, timeout_s: float | None) -> None:
        """Note that a rank is about to arrive; a repeated arrival changes nothing."""
        self._acts(f"an arrival at {key}")
        meeting = self.meetings.setdefault(key, Meeting())
        meeting.arrived_s.setdefault(rank, self.now_s())
        meeting.payloads.setdefault(rank, payload)
        meeting.timeout_s = timeout_s

    def reported(self, rank: int, participants: int, outcome: barriers_pb2.BarrierOutcome) -> None:
        """Note the outcome that a rank got, and compare it with the outcomes that other ranks got."""
        key = (outcome.name, outcome.generation, outcome.round)
        meeting = self.meetings.setdefault(key, Meeting())
        other, theirs = meeting.reported = meeting.reported or (rank, outcome)
        if _content(theirs) != _content(outcome):
            self.judge.wrong(f"{key}: rank {other} received {theirs.result}, rank {rank} {outcome.result}")
        if outcome.result != BARRIER_RESULT_RELEASED:
            return
        self.released += 1
        if len(meeting.arrived_s) < participants:
            here = sorted(meeting.arrived_s)
            self.judge.wrong(
                f"{key}: rank {rank} was released, and only {here} of {participants} had arrived"
            )
        brought = {r: p for r, p in meeting.payloads.items() if p}
        if dict(outcome.payloads) != brought:
            self.judge.wrong(f"{key}: rank {rank} was given payloads that were not brought")

    def timed_out(self, outcome: BarrierOutcome, key: str) -> str | None:
        """Return the problem of a timed-out outcome, or None."""
        name = self.keys.parts(key)[3]
        meeting = self.meetings.get((name, outcome.generation, outcome.round))
        if meeting is None or meeting.timeout_s is None or not meeting.arrived_s:
            return f"{key} timed out, and nobody had set it a time"
        waited_s = self.now_s() - min(meeting.arrived_s.values())
        if waited_s < meeting.timeout_s - 0.01:
            return f"{key} timed out after {waited_s:.3f} of {meeting.timeout_s} s"
        return None

    def refused(self, what: str, generation: int, error: StrataError) -> None:
        """Judge whether a refusal was justified when it was sent."""
        head = JobView(self.judge.view, self.judge.job).head()
        current = head.record.generation if head is not None else 0
        doomed = current == generation and self.judge.has_loss(generation)
        if isinstance(error, StaleGeneration) and current <= generation and not doomed:
            self.judge.wrong(f"{what} was refused as of an old generation: {error.message}")

    # -- saves

    def begin(self, step: int, generation: int, attempt: str) -> None:
        """Note that a rank got an attempt."""
        self._acts(f"a save of step {step}")
        self.begun.setdefault((step, generation, attempt), self.now_s())

    def ack(self, step: int, generation: int, attempt: str, rank: int) -> None:
        """Note that an ack was confirmed: it must be in the keyspace."""
        self._acts(f"an ack of step {step}")
        self.acked += 1
        key = self.judge.job.ack(step, generation, attempt, rank)
        if key not in self.judge.acks:
            self.judge.wrong(f"the ack {key} was confirmed and is not on record")

    def ack_refused(self, step: int, generation: int, attempt: str, error: StrataError) -> None:
        """Judge whether the refusal of an ack was justified."""
        self.refused(f"an ack of step {step}", generation, error)
        entry = JobView(self.judge.view, self.judge.job).checkpoint(step, generation)
        known = (step, generation, attempt) in self.begun
        if isinstance(error, CheckpointNotFound) and known and entry is not None:
            self.judge.wrong(f"an ack of step {step} was refused as never begun: {error.message}")
        still_open = entry is not None and entry.record.state is CheckpointState.OPEN
        same = entry is not None and entry.record.attempt == attempt
        if isinstance(error, CheckpointAborted) and still_open and same:
            self.judge.wrong(f"an ack of step {step} was refused as given up: {error.message}")

    def commit(self, step: int, generation: int, attempt: str, digest: str) -> None:
        """Note that a rank got the report of a commit: it must be in the keyspace, and stay there."""
        self._acts(f"a commit of step {step}")
        self.committed[step, generation, attempt] = digest
        if (step, generation, attempt) not in self.judge.buried:
            self._check_commit(step, generation, attempt, digest)
        if (why := self.samples.problem(attempt)) is not None:
            self.judge.wrong(f"the commit of step {step} of generation {generation}: {why}")

    def _check_commit(self, step: int, generation: int, attempt: str, digest: str) -> None:
        entry = JobView(self.judge.view, self.judge.job).checkpoint(step, generation)
        if (
            entry is None
            or entry.record.state is not CheckpointState.COMMITTED
            or (entry.record.attempt, entry.record.manifest_digest) != (attempt, digest)
        ):
            self.judge.wrong(f"step {step} of generation {generation} was reported as committed and is not")

    def check(self) -> None:
        """Judge at the end that everything permanent is still there."""
        for problem in self.samples.problems:
            self.judge.wrong(problem)
        for (step, generation, attempt), digest in self.committed.items():
            if (step, generation, attempt) in self.judge.buried:
                continue  # the save has since been legally marked for deletion
            self._check_commit(step, generation, attempt, digest)


def _content(outcome: barriers_pb2.BarrierOutcome) -> tuple[object, ...]:
    return outcome.result, tuple(outcome.missing), tuple(sorted(outcome.payloads.items()))
