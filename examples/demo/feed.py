"""Reads the ranks' events: the JSON lines of their logs, as they are written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass
class Feed:
    """All events of the ranks up to the last `read`."""

    logs: list[Path]
    events: list[Event] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def read(self) -> list[Event]:
        """Read new lines and return their events."""
        fresh: list[Event] = []
        for log in self.logs:
            if not log.exists():
                continue
            with log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                body = file.read()
            whole = body[: body.rfind(b"\n") + 1]
            self._read[log] = self._read.get(log, 0) + len(whole)
            for line in whole.splitlines():
                event = _parse(line)
                if event is not None:
                    fresh.append(event)
        fresh.sort(key=lambda e: float(e["at"]))
        self.events += fresh
        return fresh

    def of(self, kind: str, **facts: object) -> list[Event]:
        """Return the events of one kind that have these fields, in the order of their times."""
        return [e for e in self.events if e["event"] == kind and all(e.get(k) == v for k, v in facts.items())]

    def generation(self) -> int:
        """Return the newest generation in which a rank has started; 0 before the first."""
        return max((int(e["generation"]) for e in self.of("start")), default=0)

    def step(self) -> int:
        """Return the last step that any rank has finished since the newest restore."""
        for event in reversed(self.events):
            if event["event"] in {"step", "restore"}:
                return int(event["step"])
        return 0


def wait_for(what: str, condition: Callable[[], bool], *, limit_s: float, poll_s: float = 0.05) -> float:
    """Wait until `condition` is true; return the seconds. After the limit raise a `TimeoutError` that names `what`."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > limit_s:
            raise TimeoutError(f"{what} did not happen within {limit_s:g} s")
        time.sleep(poll_s)
    return time.monotonic() - begin


def _parse(line: bytes) -> Event | None:
    """Return the event in a rank's line, or None for any other line of the log."""
    if not line.startswith(b'{"at"'):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
