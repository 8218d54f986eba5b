"""Tests' waits for processes: the limit is on the time without progress."""

from __future__ import annotations

import sys
import threading

import pytest

from tests.processes import Event, Record, Talker


class Slowly(threading.Condition):
    """Gives each waiter the next event at once, whatever its limit; after the last event, the wait times out."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.record = Record()
        self.events = events

    def wait(self, timeout: float | None = None) -> bool:
        if not self.events:
            return False
        self.record._events.append(self.events.pop(0))
        return True


def test_a_wait_goes_on_while_records_arrive_and_ends_without_them() -> None:
    slowly = Slowly([{"event": "step", "step": number} for number in range(4)])
    slowly.record._changed = slowly
    assert slowly.record.wait_one("step", step=3, limit_s=0.0)["step"] == 3
    with pytest.raises(AssertionError, match=r"was not heard, nor anything for 0 s"):
        slowly.record.wait_one("step", step=4, limit_s=0.0)


def test_a_silent_process_is_not_waited_for_for_ever() -> None:
    talker = Talker([sys.executable, "-c", "import time; time.sleep(1000)"], name="silent", record=Record())
    try:
        with pytest.raises(AssertionError, match=r"silent runs, and said nothing for 0\.1 s"):
            talker.join(0.1)
    finally:
        talker.child.kill()
        talker.join()
