"""The trace of one run: lines for people, a digest that tells two runs apart, and counts."""

from __future__ import annotations

import asyncio
import hashlib
import traceback
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

import structlog

_NOISE = frozenset({"event", "replica"})


class Trace:
    """Records events. Every event enters the digest; the text is kept only with `keep`."""

    def __init__(self, *, keep: bool) -> None:
        self.lines: list[str] = []
        self.events: Counter[str] = Counter()
        self.bugs: list[str] = []
        """Unexpected exceptions that the shipped code caught and logged."""
        self._keep = keep
        self._digest = hashlib.blake2b(digest_size=16)
        self._began = asyncio.get_running_loop().time()

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return asyncio.get_running_loop().time() - self._began

    def note(self, who: str, what: str) -> None:
        """Record one event."""
        line = f"{self.now_s:10.6f} {who}: {what}"
        self._digest.update(line.encode())
        if self._keep:
            self.lines.append(line)

    def count(self, event: str, number: int = 1) -> None:
        """Count an event of the protocols."""
        self.events[event] += number

    def digest(self) -> str:
        return self._digest.hexdigest()

    # -- logs of the shipped code

    def capture(self) -> None:
        """Record structlog's events here, and render them nowhere."""

        def take(_logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
            name = str(event["event"])
            if method == "exception" or event.get("exc_info"):
                text = (
                    "".join(traceback.format_exc()) if event["exc_info"] is True else repr(event["exc_info"])
                )
                self.bugs.append(f"{self.now_s:.3f} s: {name}: {text}")
            self.events[f"log {name}"] += 1
            fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in _NOISE)
            self.note(str(event.get("replica", "-")), f"{name} {fields}")
            raise structlog.DropEvent

        structlog.configure(
            processors=[structlog.contextvars.merge_contextvars, take],
            wrapper_class=structlog.make_filtering_bound_logger(20),
            logger_factory=structlog.ReturnLoggerFactory(),
            cache_logger_on_first_use=False,
        )
