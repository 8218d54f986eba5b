"""Findings of a judgement: one shape for checkers, expectations and the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A violation of a property that must hold, with the evidence."""

    checker: str
    message: str
    evidence: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the entry of report.json."""
        return {"checker": self.checker, "message": self.message, "evidence": list(self.evidence)}
