"""Errors in the logs of coordinators: each error is a finding, even while a fault is in force.

A coordinator logs an *error* only for an event that should be impossible: an unexpected exception, a view that
differs from etcd. Consequences of faults are logged as warnings. So an error is a finding even if the histories show
no harm.
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
"""Errors that a coordinator must log once etcd is lost."""


def errors_in_logs(logs: Path, *, expected: Collection[str] = ()) -> list[Finding]:
    """Return one finding for each event that a coordinator logged as an error, with the first lines of the event.

    Events in `expected` are consequences of the run's faults, and give no finding.
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
            message=f"{coordinator} logged {event} as an error, {len(quotes)} times",
            evidence=tuple(quotes[:_QUOTED]),
        )
        for (coordinator, event), quotes in found.items()
    ]


def _error(line: str) -> str:
    """Return the event of a line logged as an error; empty for any other line and for a torn line."""
    if line.startswith(_BARE):
        return "a traceback"
    try:
        body: Any = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(body, dict) or body.get("level") not in _ERRORS:
        return ""
    return str(body.get("event") or "an error without a name")
