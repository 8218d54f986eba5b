"""The rule for changes of a stop notice: a new notice must name every member that the old notice named."""

from __future__ import annotations

from strata.core.kv.records import StopAction, StopNotice


def is_merged(old: StopNotice, new: StopNotice) -> bool:
    """Return whether `new` includes all requests of `old`, with no longer grace."""
    wider = old.action is new.action and set(old.workers) <= set(new.workers)
    more = old.action is StopAction.SCALE or (
        old.action is StopAction.DRAIN and new.action is StopAction.PREEMPT
    )
    unpaused = old.pause and not new.pause
    longer = new.grace_ms > old.grace_ms and old.has_deadline  # a notice for scaling has no grace
    return not longer and not unpaused and (wider or more)
