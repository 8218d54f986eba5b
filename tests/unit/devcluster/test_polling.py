"""A poll ends with the first true answer, at its time limit, or with an error."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from strata.devcluster.polling import until


def test_the_first_true_answer_is_returned() -> None:
    answers = iter([0, 0, 7, 8])
    assert until(lambda: next(answers), 30.0, every_s=0.001) == 7
    assert next(answers) == 8


def test_the_last_answer_is_returned_when_the_time_is_over() -> None:
    began = time.monotonic()
    times_s: list[float] = []

    def never() -> list[int]:
        times_s.append(time.monotonic())
        return []

    assert until(never, 0.1, every_s=0.02) == []
    assert times_s[-1] - began >= 0.1
    assert len(times_s) > 1


def test_a_zero_timeout_polls_once() -> None:
    answers = iter([0, 1])
    assert until(lambda: next(answers), 0.0) == 0


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError(), KeyboardInterrupt()])
def test_an_error_passes_at_once(error: BaseException) -> None:
    answers: Iterator[int] = iter(range(2))

    def fails() -> int:
        next(answers)
        raise error

    with pytest.raises(type(error)) as raised:
        until(fails, 30.0)
    assert raised.value is error
    assert next(answers) == 1
