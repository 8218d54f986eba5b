"""Injuries: the nemesis's record of the planned faults and their effects, from which the report is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata_chaos.faults.schedule import PlannedFault


@dataclass(slots=True, kw_only=True)
class Injury:
    """One planned fault, its effect and the recovery from it. Times are in seconds.

    `leader_s`: from the injection to the epoch of a new leader, if a new leader was elected. `barrier_s`: from the
    injection (from healing if `barrier_needed_healing` is true) until every job has had a barrier released.
    `whole_s`: from healing until the system was healthy again; None if another fault started before that.
    """

    planned: PlannedFault
    targets: tuple[str, ...] = ()
    injected: bool = False
    effective: bool = False
    evidence: str = ""
    """The evidence of the effect, or the reason why the fault was not injected."""
    held_s: float = 0.0
    leader_s: float | None = None
    barrier_s: float | None = None
    barrier_needed_healing: bool = False
    whole_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the entry of report.json."""
        planned = self.planned
        return {
            "number": planned.number,
            "fault": planned.fault,
            "at_s": planned.at_s,
            "hold_s": planned.hold_s,
            "choice": planned.choice,
            "required": planned.required,
            "targets": list(self.targets),
            "injected": self.injected,
            "effective": self.effective,
            "evidence": self.evidence,
            "held_s": round(self.held_s, 3),
            "leader_s": _rounded(self.leader_s),
            "barrier_s": _rounded(self.barrier_s),
            "barrier_needed_healing": self.barrier_needed_healing,
            "whole_s": _rounded(self.whole_s),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Injury:
        """Return the injury of an entry of report.json."""
        ours = dict(body)
        planned = PlannedFault(
            **{key: ours.pop(key) for key in ("number", "fault", "at_s", "hold_s", "choice", "required")}
        )
        return cls(planned=planned, **(ours | {"targets": tuple(ours["targets"])}))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
