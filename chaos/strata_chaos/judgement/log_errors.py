"""What coordinators said of themselves: an error in their logs is a finding, whatever was in force.

A coordinator logs as an *error* only what must never be: an exception that nobody expects, a view that
differs from etcd. What faults bring about are warnings. So the record of a run need not show the harm.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from strata_chaos.judgement.verdict import Finding

CHECKER: Final = "logs"
_ERRORS: Final = frozenset({"error", "critical"})
_BARE: Final = "Traceback (most recent call last)"
_QUOTED: Final = 3
_QUOTED_CHARS: Final = 1_500


SUSPENDED: Final = frozenset({"replica_suspended"})
"""What a coordinator has to log as an error once etcd is lost."""


def complaints(logs: Path, *, expected: Collection[str] = ()) -> list[Finding]:
    """Return one finding for each event that a coordinator logged as an error, with its first lines.

    Events in `expected` are what the faults of the run must bring about.
    """
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file in sorted(logs.glob("coordinator-*.log")):
        with file.open(errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                event = _error(line)
                if event and event not in expected:
                    found[file.stem, event].append(f"{file.name}:{number}: {line.rstrip()[:_QUOTED_CHARS]}")
    return [
        Finding(
            checker=CHECKER,
            message=f"{coordinator} logged {event} as an error, {len(said)} times",
            evidence=tuple(said[:_QUOTED]),
        )
        for (coordinator, event), said in found.items()
    ]


def _error(line: str) -> str:
    """Return the event of a line that is an error; nothing for any other, also a torn one."""
    if line.startswith(_BARE):
        return "a traceback"
    try:
        body: Any = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(body, dict) or body.get("level") not in _ERRORS:
        return ""
    return str(body.get("event") or "an error without a name")
