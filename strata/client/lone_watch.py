"""The watch over stalls of a lone trainer: no supervisor looks at it, so it looks at itself.

It runs in the background thread, which lives while the main one hangs in a collective. A main thread
that never lets go of the GIL stops it as well: that shows as a member that tells nothing.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from strata.client.stall_watch import Actions, StallWatch, Tell
from strata.config import HealthConfig, load
from strata.core.stalls import StallLimits, kind_of

log: Final = logging.getLogger("strata.client")


class Words:
    """Puts events into Python's own log, as everything that the library says in a user's process."""

    def info(self, event: str, **facts: Any) -> None:
        log.info("%s: %s", event, _told(facts))

    def warning(self, event: str, **facts: Any) -> None:
        log.warning("%s: %s", event, _told(facts))


def lone_watch(tell: Tell, *, detect_s: float, environment: Mapping[str, str]) -> StallWatch:
    """Return a watch over this process, which only reports: nobody could start it again.

    Its limits are those of `strata run`: STRATA_RUN_STALL_FACTOR, STRATA_RUN_STALL_LIMITS.
    """
    config = load(HealthConfig, env=environment)
    fixed_s = {kind_of(phase): seconds for phase, seconds in config.phase_limits_s().items()}
    return StallWatch(
        StallLimits.derive(detect_s, factor=config.stall_factor, fixed_s=fixed_s),
        Actions(log=Words(), tell=tell, stack=own_stacks, trace=_no_trace, evict=None, blame=_nobody),
    )


async def own_stacks(rank: int) -> str | None:
    """Return where this process's threads stand, as faulthandler writes it."""
    descriptor = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        size = os.lseek(descriptor, 0, os.SEEK_CUR)
        return os.pread(descriptor, size, 0).decode(errors="replace") or None
    finally:
        os.close(descriptor)


async def _no_trace(rank: int) -> tuple[Path, int] | None:
    return None


async def _nobody() -> Collection[int] | None:
    return None


def _told(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {fact}" for name, fact in facts.items() if fact is not None)
