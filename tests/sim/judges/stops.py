"""Rules for planned stops: ranks stop at one common step, and the leader waits for it.

In some seeds ranks take part in stops (`saves_first`). They meet at `strata.begin`, agree on a last step by the
product's own agreement while they train on, save this step together, and then wait. The rules do not use
`core.worlds.changes`: they look only at the living members, the requests, the decisions that ranks got, and the save.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.core.job import JobView, World
from strata.core.kv.records import BarrierOutcome, CheckpointState, JobPhase, StopAction, unb64
from strata.core.stop.last_step import BEGIN_BARRIER, Decision, read_decision

AGREE_S = 60.0
"""The limit for a notice without a deadline (scale): then the leader may start a world of another size, even if the
ranks have agreed on no step."""
LATE_S = 30.0
"""The limit for a notice with a deadline, counted from the end of its grace."""


def saves_first(seed: int) -> bool:
    """Return whether the ranks of this seed take part in stops; never in seeds with checkpoint maintenance."""
    return seed % 7 == 6 and seed % 3 != 0


@dataclass(slots=True)
class Stops:
    """For each generation: the stop requests, the decided step, and the last step begun."""

    first_request_s: dict[int, float] = field(default_factory=dict)
    """Generation -> time of the first stop request."""
    widened_s: dict[int, float] = field(default_factory=dict)
    """Generation -> time of the last request that added members to the stop, or a pause."""
    decisions: dict[int, Decision] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    stopped: set[tuple[int, int]] = field(default_factory=set)
    """Ranks that have finished the common step and its save: (generation, rank)."""
    _world: World | None = None
    _revision: int = 0

    def stop_requested(self, generation: int, now_s: float) -> None:
        """Note that the ranks of a generation get a stop request, or a wider request than before."""
        self.first_request_s.setdefault(generation, now_s)
        self.widened_s[generation] = now_s

    def decided(self, generation: int, decision: Decision) -> str | None:
        """Note a decision, which an outcome holds or a rank has read; return a problem with the decision, or None."""
        if self.decisions.setdefault(generation, decision) != decision:
            return f"generation {generation} got both {self.decisions[generation]} and {decision}"
        return self._beyond(generation)

    def outcome(self, generation: int, outcome: BarrierOutcome) -> str | None:
        """Note the decision in an outcome, even if no rank gets it; return its problem, or None."""
        brought = {int(rank): unb64(text) for rank, text in outcome.payloads.items()}
        decision = read_decision(brought, ranks=len(brought))
        return None if decision is None else self.decided(generation, decision)

    def begins(self, generation: int, step: int) -> str | None:
        """Note that a rank begins a step; return why it may not, or None."""
        self.begun[generation] = max(step, self.begun.get(generation, 0))
        return self._beyond(generation)

    def _beyond(self, generation: int) -> str | None:
        decision, begun = self.decisions.get(generation), self.begun.get(generation, 0)
        if decision is not None and begun > decision.step:
            return f"a rank of generation {generation} began step {begun}, and others stop at {decision.step}"
        return None

    def head(self, job: JobView, now_s: float) -> str | None:
        """Return a problem with a newly written head (it may not follow the previous head), or None."""
        before, revision = self._world, self._revision
        head = job.head()
        assert head is not None
        self._world, self._revision = job.world(), head.mod_revision
        if before is None or before.head.forming or self._was_ended(job, before, revision):
            return None
        generation, now = before.head.generation, head.record
        if not job.met(BEGIN_BARRIER, generation) or self._is_over(job, before, now_s):
            return None
        what = f"generation {now.generation} followed {generation}, which nothing had ended ({now.reason}),"
        decision = self.decisions.get(generation)
        if decision is None:
            return f"{what} before its ranks had agreed on a step"
        if not decision.save:
            return None
        entry = job.checkpoint(decision.step, generation)
        state = "absent" if entry is None else entry.record.state.value
        if entry is not None and entry.record.state is CheckpointState.ABORTED:
            return None
        if entry is None or entry.record.state is not CheckpointState.COMMITTED:
            return f"{what} and step {decision.step}, at which its ranks stopped, is {state}"
        point = now.restore
        if point is not None and (point.record_generation, point.step) != (generation, decision.step):
            return (
                f"{what} and begins from step {point.step}, not from {decision.step}, which its ranks saved"
            )
        return None

    def _is_over(self, job: JobView, world: World, now_s: float) -> bool:
        """Return whether the leader may stop waiting: the time is over, or all requested ranks have ended."""
        generation = world.head.generation
        notice = job.notice(generation)
        if notice is None:
            return False
        record = notice.record
        if not record.has_deadline:
            return (
                generation not in self.decisions
                and now_s - self.first_request_s.get(generation, now_s) >= AGREE_S
            )
        if now_s - self.widened_s.get(generation, now_s) >= record.grace_ms / 1000 + LATE_S:
            return True
        named = record.action is StopAction.DRAIN
        ended = job.done(generation) | job.stopped(generation)
        requested = [m for m in world.members if not named or m.worker in record.workers]
        return not record.grace_ms or all(set(member.ranks) <= ended for member in requested)

    @staticmethod
    def _was_ended(job: JobView, world: World, revision: int) -> bool:
        """Return whether an unplanned event or an immediate pause ended a world."""
        generation = world.head.generation
        alive = all(
            (worker := job.worker(member.worker)) is not None and worker.create_revision == member.incarnation
            for member in world.members
        )
        phase, head = job.view.entry(job.keys.phase, JobPhase), job.head()
        assert head is not None
        # a planned pause has the head's own revision; so a phase between the two heads is an immediate pause
        paused = phase is not None and revision < phase.mod_revision < head.mod_revision
        return not alive or paused or bool(job.failed(generation))
