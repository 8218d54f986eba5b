"""What a judgement finds: one shape for checkers, expectations and the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that must hold and did not, with what shows it."""

    checker: str
    message: str
    evidence: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return it for report.json."""
        return {"checker": self.checker, "message": self.message, "evidence": list(self.evidence)}
