"""Growth and shrinking save first: whether a world of another size followed the save that the ranks were asked for.

Some seeds have ranks that heed it (`saves_first`): they meet at `strata.begin`, and when one of them has heard that
another world follows, all save the step at whose barrier it says so, meet at `strata.stop.saved`, and wait. The
judgement asks nothing of `core.world_changes`: it looks at who is alive, at what was asked, and at the save.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.core.job import JobView, World
from strata.core.records import CheckpointState, JobPhase, Phase

BEGIN_BARRIER = "strata.begin"
SAVED_BARRIER = "strata.stop.saved"
TIME_S = 65.0
"""After that nobody has to wait for the ranks."""


def saves_first(seed: int) -> bool:
    """Tell whether the ranks of this seed save before a world of another size: in none where checkpoints are kept."""
    return seed % 7 == 6 and seed % 3 != 0


@dataclass(slots=True)
class Reshapings:
    """What was asked of the ranks of each generation, and the step that they saved for it."""

    asked_s: dict[int, float] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    _world: World | None = None
    _revision: int = 0

    def asked(self, generation: int, now_s: float) -> None:
        """Note that the ranks of a generation are asked to save."""
        self.asked_s.setdefault(generation, now_s)

    def has_saved(self, generation: int, step: int) -> str | None:
        """Note the step that a rank saved; say what is wrong with it."""
        if self.saved.setdefault(generation, step) != step:
            return f"generation {generation} saved step {self.saved[generation]} and step {step} for another world"
        return None

    def head(self, job: JobView, now_s: float) -> str | None:
        """Say what is wrong with a head that was just written, as what follows the one before."""
        before, revision = self._world, self._revision
        head = job.head()
        assert head is not None
        self._world, self._revision = job.world(), head.mod_revision
        if before is None or before.head.forming or self._was_ended(job, before, revision):
            return None
        generation, now = before.head.generation, head.record
        if not job.met(BEGIN_BARRIER, generation):
            return None
        if now_s - self.asked_s.get(generation, now_s) >= TIME_S:
            return None
        what = f"generation {now.generation} followed {generation}, which nothing had ended ({now.reason}),"
        if not job.met(SAVED_BARRIER, generation):
            return f"{what} before its ranks had saved"
        step = self.saved[generation]
        entry = job.checkpoint(step, generation)
        if entry is None or entry.record.state is CheckpointState.ABORTED:
            return None
        if entry.record.state is not CheckpointState.COMMITTED:
            return f"{what} and step {step}, which its ranks saved for it, is {entry.record.state.value}"
        point = now.restore
        if point is not None and (point.record_generation, point.step) != (generation, step):
            return f"{what} and begins from step {point.step}, not from {step}, which its ranks saved for it"
        return None

    @staticmethod
    def _was_ended(job: JobView, world: World, revision: int) -> bool:
        """Tell whether something else than its size ended a world: a death, a request, a pause."""
        generation = world.head.generation
        alive = all(
            (worker := job.worker(member.worker)) is not None and worker.create_revision == member.incarnation
            for member in world.members
        )
        phase = job.view.entry(job.keys.phase, JobPhase)
        paused = job.phase() is not Phase.RUNNING or (phase is not None and phase.mod_revision > revision)
        return not alive or paused or bool(job.failed(generation)) or job.notice(generation) is not None
