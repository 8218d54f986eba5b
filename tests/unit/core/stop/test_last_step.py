"""All ranks must stop after the same step: every interleaving of small models, the planted faults, and edge cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.stop.last_step import Agreement, Decision, NextStep, Verdict, read_decision
from strata.errors import InvalidArgument, Refused
from tests.unit.core.stop_model import DRAIN, PREEMPT, SCALE, Rules, Violation, search

# -- every order of events ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "rules", "least"),
    [
        pytest.param(2, Rules(), 10_000, id="two ranks, a scale that becomes a preemption"),
        pytest.param(2, Rules(last=2, begun=0), 10_000, id="before the first step"),
        pytest.param(2, Rules(last=2, notices=(SCALE, DRAIN, PREEMPT)), 10_000, id="each wider notice"),
        pytest.param(2, Rules(last=2, losses=1), 10_000, id="the loss of all coordinators"),
        pytest.param(3, Rules(last=1, notices=(SCALE,)), 5_000, id="three ranks"),
        pytest.param(3, Rules(last=1, notices=(PREEMPT,), losses=1), 10_000, id="three ranks, and a loss"),
    ],
)
def test_all_ranks_stop_or_finish_together_and_no_rank_waits_forever(
    size: int, rules: Rules, least: int
) -> None:
    ends, states = search(size, rules)
    assert {"saved", "done"} <= ends
    assert states > least  # the search is not trivial


@pytest.mark.parametrize("notices", [(SCALE, PREEMPT), (DRAIN,)])
def test_deaths_deadlines_and_a_leader_that_waits_no_longer_break_no_promise(
    notices: tuple[int, ...],
) -> None:
    rules = Rules(last=2, notices=notices, deaths=True, late=True, deadlines=True)
    ends, _ = search(2, rules)
    assert ends == {"saved", "not saved", "done"}


def test_if_one_rank_cannot_save_all_ranks_stop_without_a_save() -> None:
    ends, _ = search(2, Rules(last=2, notices=(SCALE, PREEMPT), cannot=True))
    assert ends == {"not saved", "done"}


def test_a_rank_that_leaves_before_a_resize_failed_and_delays_no_rank() -> None:
    ends, _ = search(2, Rules(last=2, exits=True))
    assert ends == {"saved", "not saved", "done"}


@pytest.mark.parametrize(
    ("fault", "rules", "found"),
    [
        ("one round only", Rules(), "a step after the common one|no outcome says"),
        ("a local release", Rules(), "a step after the common one"),
        ("S is chosen again", Rules(), "decided twice|a step after the common one"),
        ("a head that compares nothing", Rules(), "knows nothing of the commit or of the notice"),
        ("a staying rank exits", Rules(notices=(SCALE,)), "to stay has left"),
        (
            "75 is a stop before another size",
            Rules(last=2, notices=(SCALE,), exits=True),
            "or the leader does",
        ),
        ("a round lost on reconnect", Rules(last=2, losses=1), "waits for ever"),
    ],
)
def test_the_search_finds_a_planted_fault(fault: str, rules: Rules, found: str) -> None:
    with pytest.raises(Violation, match=found):
        search(2, replace(rules, faults=frozenset({fault})))


# -- one rank -----------------------------------------------------------------------------------


def meet(*ranks: Agreement) -> list[Agreement]:
    """Return the ranks after one round during which no rank trains on."""
    proposals = {i: rank.propose() for i, rank in enumerate(ranks)}
    answered = [rank.answer(proposals, ranks=len(ranks)) for rank in ranks]
    answers = {i: payload for i, (_, payload) in enumerate(answered)}
    return [rank.conclude(answers, ranks=len(ranks)) for rank, _ in answered]


@given(st.lists(st.integers(min_value=1, max_value=10**12), min_size=1, max_size=8))
def test_the_first_round_aims_at_the_step_that_the_furthest_rank_is_in(begun: list[int]) -> None:
    ranks = meet(*(Agreement(begun=b) for b in begun))
    assert {rank.decision for rank in ranks} == {Decision(max(begun), Verdict.SAVE)}


def test_a_rank_past_the_proposed_step_moves_all_ranks_to_a_later_one() -> None:
    slow = fast = Agreement(begun=10)
    proposals = {0: slow.propose(), 1: fast.propose()}
    held, ok = slow.answer(proposals, ranks=2)
    past, no = fast.begin(10)[0].answer(proposals, ranks=2)
    assert (held.hold, past.hold) == (10, None)
    assert held.begin(9)[1] is NextStep.GO
    assert held.begin(10)[1] is NextStep.WAIT
    answers = {0: ok, 1: no}
    assert read_decision(answers, ranks=2) is None
    held, past = (rank.conclude(answers, ranks=2) for rank in (held, past))
    assert (held.decision, held.begin(10)[1], held.round) == (None, NextStep.GO, 1)
    assert [rank.decision for rank in meet(held, past)] == [Decision(11 + 2, Verdict.SAVE)] * 2


def test_the_margin_grows_by_two_steps_a_round() -> None:
    steps = []
    for number in range(4):
        offer = Agreement(begun=5, round=number).answer(
            {0: Agreement(begun=5, round=number).propose()}, ranks=1
        )[0]
        steps.append(offer.hold)
    assert steps == [5, 7, 9, 11]


def test_a_rank_trains_up_to_the_common_step_and_then_stops() -> None:
    (rank,) = meet(Agreement(begun=5))
    assert rank.begin(4) == (rank, NextStep.GO)
    assert rank.begin(5)[1] is NextStep.STOP
    assert rank.begin(6)[1] is NextStep.STOP


def test_a_decision_survives_a_round_that_breaks_and_a_hold_does_not() -> None:
    (rank,) = meet(Agreement(begun=5))
    assert replace(rank.released(), offer=rank.offer) == rank
    assert Agreement(begun=3, hold=5).released().hold is None


# -- whether the step is saved ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        ([{"left_ms": 30_000}, {"left_ms": 29_000}], Verdict.SAVE),
        ([{"left_ms": 30_000, "cost_ms": 4000}, {"left_ms": 29_000}], Verdict.SAVE),
        ([{"cost_ms": 400_000}, {}], Verdict.SAVE),
        ([{"left_ms": 30_000, "cost_ms": 100}, {"left_ms": 3000, "cost_ms": 4000}], Verdict.TOO_SLOW),
        ([{"left_ms": 3000}, {"cost_ms": 4000}], Verdict.TOO_SLOW),
        ([{"left_ms": 30_000}, {"left_ms": 0}], Verdict.NO_TIME),
        ([{}, {"can_save": False}], Verdict.CANNOT),
    ],
)
def test_all_ranks_save_or_none_does(ranks: list[dict[str, Any]], verdict: Verdict) -> None:
    proposals = {i: Agreement(begun=7).propose(**brings) for i, brings in enumerate(ranks)}
    rank, answer = Agreement(begun=7).answer(proposals, ranks=len(ranks))
    assert rank.offer == Decision(7, verdict)
    decision = read_decision(dict.fromkeys(range(len(ranks)), answer), ranks=len(ranks))
    assert decision == rank.offer
    assert decision.save == (verdict is Verdict.SAVE)
    assert verdict.sentence


def test_a_restored_step_is_not_saved_again() -> None:
    (rank,) = meet(Agreement(start=20, begun=20))
    assert rank.decision == Decision(20, Verdict.NOTHING_NEW)


# -- payloads of other ranks --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"", Refused),
        (b"\xff", Refused),
        (b"[]", Refused),
        (b"{}", Refused),
        (b'[1,"p",0,3,0,-1,1]', Refused),
        (b'[2,"p",1,3,0,-1,1]', Refused),
        (b'[2,"a",0,3,1,0]', Refused),
        (b'[2,"p",0,3,0,-1]', Refused),
        (b'[2,"p",0,-2,0,-1,1]', InvalidArgument),
        (b'[2,"p",0,true,0,-1,1]', InvalidArgument),
        (b'[2,"p",0,"3",0,-1,1]', InvalidArgument),
    ],
)
def test_a_payload_of_another_program_is_refused(payload: bytes, error: type[Exception]) -> None:
    rank = Agreement(begun=3)
    with pytest.raises(error, match="rank 1"):
        rank.answer({0: rank.propose(), 1: payload}, ranks=2)
    assert read_decision({0: rank.propose(), 1: payload}, ranks=2) is None


def test_a_rank_without_a_proposal_is_named() -> None:
    with pytest.raises(Refused, match=r"ranks \[1\] sent nothing"):
        Agreement().answer({0: Agreement().propose()}, ranks=2)


def test_ranks_that_answer_for_different_steps_are_refused() -> None:
    with pytest.raises(Refused, match="different steps"):
        Agreement().conclude({0: b'[2,"a",0,5,1,0]', 1: b'[2,"a",0,6,1,0]'}, ranks=2)
