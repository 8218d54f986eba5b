"""A rank's compute time of a step: its wait for batches and its thread's work, not its wait for other ranks."""

from __future__ import annotations

from collections.abc import Iterator

from strata.training.loop.clock import Clock
from strata.training.loop.compute_timer import ComputeTimer


class Time:
    """A clock that only a test moves: `sleep` passes time, and `work` also uses processor time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.used_s = 50.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.used_s += seconds


def make() -> tuple[Time, ComputeTimer]:
    time = Time()
    clock = Clock(monotonic_s=lambda: time.now_s, unix_s=lambda: time.now_s, thread_s=lambda: time.used_s)
    return time, ComputeTimer(clock)


def test_compute_time_includes_data_wait_and_work_but_no_collectives() -> None:
    time, own = make()

    def batches() -> Iterator[int]:
        for number in range(2):
            time.sleep(3.0)  # the loader
            yield number

    measured = []
    for _batch in own.waiting(batches()):
        own.begins()
        time.work(2.0)
        time.sleep(10.0)  # a collective
        own.completed()
        measured.append(own.last_s)
        time.work(7.0)  # a save
    assert measured == [5.0, 5.0]


def test_the_compute_time_of_a_step_includes_all_its_batches() -> None:
    time, own = make()

    def batches() -> Iterator[int]:
        for number in range(4):
            time.work(1.0)  # loaded in this thread: counted once as a wait, not again as work
            yield number

    measured = []
    for number in own.waiting(batches()):
        own.begins()
        time.work(2.0)
        if number % 2:
            own.completed()
            measured.append(own.last_s)
    assert measured == [6.0, 6.0]


def test_compute_time_in_a_custom_loop_is_the_work() -> None:
    time, own = make()
    assert own.last_s == 0.0
    for _ in range(2):
        own.begins()
        time.work(1.5)
        time.sleep(9.0)
        own.completed()
    assert own.last_s == 1.5
