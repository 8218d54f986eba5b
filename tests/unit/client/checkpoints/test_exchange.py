"""One rank's view of the exchange rounds, in which ranks compare their tensors."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.client.checkpoints.exchange import RankExchange
from strata.core.checkpoints.lifecycle import COMPARE_BARRIER
from strata.core.kv.records import CheckpointState
from strata.errors import (
    BarrierBroken,
    BarrierTimeout,
    CheckpointAborted,
    CheckpointError,
    StaleGeneration,
    Unavailable,
)

RECORD = CheckpointMetadata(
    id="a1", step=7, generation=1, path="file:///x", state=CheckpointState.OPEN, ranks=2
)
LATE = BarrierTimeout("rank 1 is late", missing=["1"])

Round = Callable[[bytes], dict[int, bytes]]


class Script:
    """Rank 0's session and catalog, scripted: each round ends as the next item of `rounds` prescribes."""

    world_size = 2
    rank = 0

    def __init__(self, *rounds: Round | Exception, found: CheckpointMetadata | Exception = RECORD) -> None:
        self.rounds = list(rounds)
        self.found = found
        self.sent: list[bytes] = []
        self.looks = 0

    def barrier(self, name: str, payload: bytes, *, timeout_s: float) -> dict[int, bytes]:
        assert (name, timeout_s) == (COMPARE_BARRIER, 0.01)
        self.sent.append(payload)
        outcome = self.rounds.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome(payload)

    def look(self, checkpoint: CheckpointMetadata) -> CheckpointMetadata:
        self.looks += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def met(payload: bytes) -> dict[int, bytes]:
    return {1: payload[:-4] + b"rank", 0: payload}


def say(
    script: Any, *, wait_s: float = 20.0, cancelled: threading.Event | None = None, stage: int = 1
) -> Any:
    exchange = RankExchange(script, script, wait_s=wait_s, round_s=0.01)
    return exchange(RECORD, stage, b"mine", cancelled=cancelled or threading.Event())


def other(*, attempt: str = "a1", step: int = 7, stage: int = 1) -> bytes:
    """Return the message that rank 1 sends for another attempt or stage."""
    script: Any = Script(met)
    exchange = RankExchange(script, script, wait_s=1, round_s=0.01)
    exchange(dataclasses.replace(RECORD, id=attempt, step=step), stage, b"rank", cancelled=threading.Event())
    return bytes(script.sent[0])


def test_the_messages_of_all_ranks_come_in_their_order() -> None:
    assert say(Script(met)) == [b"mine", b"rank"]


@pytest.mark.parametrize(
    "theirs", [other(attempt="a2"), other(step=8), other(stage=0)], ids=["attempt", "step", "stage"]
)
def test_a_round_with_a_message_of_another_save_or_stage_is_repeated(theirs: bytes) -> None:
    script = Script(lambda mine: {0: mine, 1: theirs}, met)
    assert say(script) == [b"mine", b"rank"]
    assert (len(script.sent), script.looks) == (2, 1)


def test_a_ranks_message_for_an_earlier_save_is_not_reused() -> None:
    """A call that timed out leaves its arrival open, and the next call receives the outcome of that round."""
    before = other(attempt="a0", step=6)
    script = Script(lambda _: {0: before, 1: before}, met)
    assert say(script) == [b"mine", b"rank"]


def test_a_round_without_every_rank_is_repeated() -> None:
    script = Script(lambda mine: {0: mine}, met)
    assert say(script) == [b"mine", b"rank"]


def test_a_late_rank_is_waited_for_and_an_unanswered_round_is_retried() -> None:
    script = Script(LATE, Unavailable("nobody"), LATE, met)
    assert say(script) == [b"mine", b"rank"]
    assert len(set(script.sent)) == 1, "the same message in every round"


def test_a_rank_that_missed_the_outcome_requests_it_even_after_the_others_acked() -> None:
    script = Script(Unavailable("cut off"), met, found=dataclasses.replace(RECORD, acked=frozenset({1})))
    assert say(script) == [b"mine", b"rank"]


def test_a_late_rank_passes_rounds_that_broke_without_it_at_once() -> None:
    began = time.monotonic()
    assert say(Script(*[LATE] * 30, met)) == [b"mine", b"rank"]
    assert time.monotonic() - began < 2.0, "no pause of 0.2 s for each of the 30"


@pytest.mark.parametrize(
    ("rounds", "found", "error", "says"),
    [
        ([LATE], CheckpointAborted("given up: rank 1"), CheckpointAborted, "given up: rank 1"),
        (
            [LATE],
            dataclasses.replace(RECORD, acked=frozenset({1})),
            CheckpointError,
            "ranks 1 saved step 7 without",
        ),
        (
            [BarrierBroken("rank 1 died", missing=["1"])],
            RECORD,
            CheckpointAborted,
            "lost a rank: rank 1 died",
        ),
        ([StaleGeneration("over")], RECORD, StaleGeneration, "over"),
        ([LATE] * 10_000, RECORD, Unavailable, "not committed after 0.05 s.*rank 1 is late"),
        ([Unavailable("nobody")] * 10**6, RECORD, Unavailable, "not committed after 0.05 s.*nobody"),
    ],
    ids=["aborted", "does not compare", "died", "stale", "late for good", "nobody answers"],
)
def test_aborts_lost_ranks_and_timeouts_end_a_comparison(
    rounds: Any, found: Any, error: type[Exception], says: str
) -> None:
    script = Script(*rounds, found=found)
    if error is Unavailable:  # let each round take a moment
        wait = script.barrier
        script.barrier = lambda *a, **b: (threading.Event().wait(0.005), wait(*a, **b))[1]  # type: ignore[method-assign]
    with pytest.raises(error, match=says):
        say(script, wait_s=0.05 if error is Unavailable else 20.0)


def test_a_save_is_cancelled_between_two_rounds() -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CheckpointAborted, match="was cancelled"):
        say(Script(LATE), cancelled=cancelled)


def test_a_failing_session_is_retried_with_a_pause() -> None:
    script = Script(*[Unavailable("nobody")] * 10**4)
    with pytest.raises(Unavailable, match="nobody"):
        say(script, wait_s=0.3)
    assert len(script.sent) <= 3
