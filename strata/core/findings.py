"""What is wrong with a job's ranks, saves and devices, in one sentence that everybody shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.core.save_hold import SaveHold, no_checkpoint
from strata.core.stalls import Slow, Standing, stragglers, suspects

NAMED: Final = 3
"""So many of a kind are named; of the others the number is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What is known of one rank of the current generation."""

    rank: int
    step: int
    phase: str
    age_ms: int
    stalled_ms: int = 0
    median_step_us: int = 0
    waits: bool = False
    where: str = ""
    """The innermost function of its main thread, if that is known."""
    hold: SaveHold | None = None
    """Why it cannot save for now, and for how long by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SickDevice:
    worker: str
    index: int
    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is wrong at this moment; `says` is empty when nothing is known."""

    stalled: tuple[RankReport, ...] = ()
    suspects: tuple[int, ...] = ()
    """Those of the stalled ranks that hold up the others, as far as it shows."""
    how: str = ""
    """How that shows."""
    slow: tuple[Slow, ...] = ()
    sick: tuple[SickDevice, ...] = ()
    impossible: tuple[str, ...] = ()
    """What the job's keys say and cannot be (`core.invariants`)."""
    held: tuple[RankReport, ...] = ()
    """The ranks that train on and cannot save for now, the one that cannot for longest first."""
    says: str = ""

    @property
    def held_s(self) -> float:
        """For how long a rank has not been able to save; 0 while all can."""
        return self.held[0].hold.held_s if self.held and self.held[0].hold is not None else 0.0


def diagnose(
    words: Sequence[RankReport],
    faults: Mapping[tuple[str, int], str],
    impossible: Sequence[str] = (),
    *,
    committed_step: int | None = None,
) -> Diagnosis:
    """Return what is wrong with ranks that said `words`, with devices by (worker, index), and with the keys.

    `committed_step`: that of the job's newest checkpoint, which is old while saves are held.
    """
    stalled = tuple(word for word in words if word.stalled_ms > 0)
    named, how = suspects(
        [Standing(rank=w.rank, step=w.step, phase=w.phase, waits=w.waits, where=w.where) for w in stalled]
    )
    slow = tuple(stragglers({w.rank: w.median_step_us / 1e6 for w in words if w.median_step_us > 0}))
    sick = tuple(
        SickDevice(worker=worker, index=index, fault=fault)
        for (worker, index), fault in sorted(faults.items())
        if fault
    )
    holds = {word: word.hold for word in words if word.hold is not None}
    held = tuple(sorted(holds, key=lambda word: (-holds[word].held_s, word.rank)))
    parts = [
        *([no_checkpoint(*holds.values(), committed_step=committed_step)] if holds else []),
        *_stalls(stalled, named),
        *_few([f"rank {s.rank} takes {s.times:.1f} times the median for a step" for s in slow], "slow ranks"),
        *_few([f"device {s.index} of {s.worker}: {s.fault}" for s in sick], "sick devices"),
        *_few([f"its keys hold what cannot be: {each}" for each in impossible], "things that cannot be"),
    ]
    return Diagnosis(
        stalled=stalled,
        suspects=named,
        how=how if stalled else "",
        slow=slow,
        sick=sick,
        impossible=tuple(impossible),
        held=held,
        says="; ".join(parts),
    )


def _stalls(stalled: Sequence[RankReport], named: tuple[int, ...]) -> list[str]:
    if not stalled:
        return []
    blamed = [word for word in stalled if word.rank in named]
    if len(blamed) == len(stalled) > NAMED:
        longest_s = max(word.stalled_ms for word in blamed) / 1000
        step = min(word.step for word in blamed)
        return [f"{len(blamed)} ranks stand still at step {step} for {longest_s:.0f} s"]
    parts = _few(
        [
            f"rank {w.rank} stands still at step {w.step}"
            + (f" ({w.phase})" if w.phase else "")
            + f" for {w.stalled_ms / 1000:.0f} s"
            for w in sorted(blamed, key=lambda word: word.rank)
        ],
        "ranks that stand still",
    )
    if held_up := len(stalled) - len(blamed):
        parts[-1] += f", and {held_up} more with {'it' if len(blamed) == 1 else 'them'}"
    return parts


def _few(sentences: list[str], kind: str) -> list[str]:
    if len(sentences) <= NAMED:
        return sentences
    return [*sentences[:NAMED], f"{len(sentences) - NAMED} more {kind}"]
