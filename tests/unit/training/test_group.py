"""The barrier at which standalone processes agree on the address of torch's store."""

from __future__ import annotations

from typing import Any

import pytest

from strata.errors import BarrierBroken, BarrierTimeout
from strata.training.group import MEETING, MEETING_S, MEETINGS, meet


class Ranks:
    """Peers whose barriers end with the items of `ends`, one after the other."""

    def __init__(self, *ends: Exception | dict[int, bytes]) -> None:
        self.ends = list(ends)
        self.requests: list[tuple[str, bytes, float]] = []

    def barrier(self, name: str, payload: bytes, *, timeout_s: float) -> dict[int, bytes]:
        self.requests.append((name, payload, timeout_s))
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


def met(ranks: Ranks) -> dict[int, bytes]:
    context: Any = ranks
    return meet(context, b"here")


def test_a_rank_that_is_late_is_waited_for() -> None:
    ranks = Ranks(BarrierTimeout("rank 1 is missing"), {0: b"there"})
    assert met(ranks) == {0: b"there"}
    assert ranks.requests == [(MEETING, b"here", MEETING_S)] * 2
    assert MEETINGS * MEETING_S >= 1_200, "a start waits for 900 s, by default"


def test_the_wait_for_a_late_rank_ends_at_a_limit_and_if_a_rank_is_lost() -> None:
    ranks = Ranks(*[BarrierTimeout("rank 1 is missing")] * MEETINGS)
    with pytest.raises(BarrierTimeout):
        met(ranks)
    with pytest.raises(BarrierBroken):
        met(Ranks(BarrierBroken("rank 1 died")))
