"""What a notice may become: nobody who was asked for is forgotten."""

from __future__ import annotations

from strata.core.kv.records import StopAction, StopNotice


def is_merged(old: StopNotice, new: StopNotice) -> bool:
    """Tell whether `new` asks at least for what `old` does, in no more time."""
    wider = old.action is new.action and set(old.workers) <= set(new.workers)
    more = old.action is StopAction.SCALE or (
        old.action is StopAction.DRAIN and new.action is StopAction.PREEMPT
    )
    unpaused = old.pause and not new.pause
    longer = new.grace_ms > old.grace_ms and old.has_deadline  # to scale has no grace
    return not longer and not unpaused and (wider or more)
