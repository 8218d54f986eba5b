"""Recording of a client's operations: a beginning before its effect, and no failure if the outcome is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.errors import (
    BarrierBroken,
    BarrierTimeout,
    CheckpointAborted,
    Conflict,
    OutcomeUnknown,
    StaleGeneration,
    StaleIncarnation,
    StrataError,
    Unavailable,
    by_code,
)
from strata_chaos.history import History, HistoryWriter, Outcome
from strata_chaos.workloads.recording import Recorder, outcome_of


def recorder(path: Path) -> Recorder:
    times = iter(range(100))
    return Recorder(HistoryWriter(path), client="c", clock=lambda: float(next(times)))


def test_an_announced_operation_is_written_before_it_has_an_effect(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    with recorder(path).operation("save", announce=True, step=3) as running:
        (begun,) = History(path)
        assert begun.begun
        assert begun.args == {"step": 3}
        running.result["attempt"] = "a"
    _, ended = History(path)
    assert (ended.id, ended.outcome, ended.result) == (begun.id, Outcome.OK, {"attempt": "a"})
    assert (ended.t0, ended.t1) == (begun.t0, 1.0)


@pytest.mark.parametrize(
    "error", [Unavailable("u"), OutcomeUnknown("o"), StaleGeneration("g"), TimeoutError()]
)
def test_an_ambiguous_end_is_unknown(error: Exception, tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    with pytest.raises(type(error)), recorder(path).operation("o"):
        raise error
    (ended,) = History(path)
    assert ended.outcome is Outcome.UNKNOWN
    assert ended.error is not None
    assert ended.error.type == type(error).__name__


@pytest.mark.parametrize(
    "error", [BarrierTimeout("t"), BarrierBroken("b"), Conflict("c"), CheckpointAborted("a")]
)
def test_an_error_with_a_definite_outcome_is_a_failure(error: StrataError) -> None:
    assert outcome_of(error) is Outcome.FAIL


def test_a_retryable_error_is_an_unknown_outcome() -> None:
    for cls in by_code().values():
        if cls.retryable or cls is StaleIncarnation:
            assert outcome_of(cls("m")) is Outcome.UNKNOWN
