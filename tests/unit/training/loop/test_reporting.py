"""Rank 0's training report: its values are those of the step it is reported with, although it is built later."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.core.health.goodput import Ledger
from strata.errors import InvalidArgument
from strata.training.loop.reporting import TrainingReporter
from strata.training.rank_context import Alone
from strata.training.save.state import Position
from tests.unit.training.making import make_run


def test_a_message_has_the_values_of_the_moment_it_was_requested() -> None:
    reporter, ledger = TrainingReporter(total_steps=100), Ledger(since_s=0.0)
    reporter.report({"loss": 3.0})
    ledger.enter("step", 2.0)
    make = reporter.message(0, Position(step=1, epoch=2, samples=8), ledger.so_far())
    reporter.report({"loss": 1.0, "lr": 0.1})
    ledger.enter("eval", 5.0)
    assert make is not None
    message = make()
    assert (message.epoch, message.samples, message.target_step) == (2, 8, 100)
    assert (dict(message.reported), dict(message.goodput_s)) == ({"loss": 3.0}, {"start": 2.0})


def test_only_rank_0_sends_a_training_report() -> None:
    reporter, ledger = TrainingReporter(total_steps=None), Ledger(since_s=0.0)
    assert reporter.message(1, Position(), ledger.so_far()) is None


def test_values_that_a_message_cannot_carry_are_replaced() -> None:
    reporter, ledger = TrainingReporter(total_steps=None), Ledger(since_s=0.0, phase="\ud800 eval")
    ledger.enter("step", 1.0)
    make = reporter.message(0, Position(samples=2**64), ledger.so_far())
    assert make is not None
    assert (make().samples, dict(make().goodput_s)) == (2**63 - 1, {"? eval": 1.0})


@pytest.mark.parametrize("epoch", [-1, 2**63, 1.5])
def test_an_invalid_epoch_is_refused_before_it_starts(epoch: int, tmp_path: Path) -> None:
    run = make_run(Alone(world_size=1), tmp_path, state={}, wait_s=1.0)
    with pytest.raises(InvalidArgument, match="epoch"):
        run.steps([1], epoch=epoch)
    with pytest.raises(InvalidArgument, match="epoch"):
        run.step_done(1, epoch=epoch)
    assert (run.epoch, run.step) == (0, 0)
    run.close()
