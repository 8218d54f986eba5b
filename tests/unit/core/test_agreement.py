"""All ranks stop after the same step: every interleaving of small models, and the edges.

A model is a world of ranks of which each has a trainer and a background thread. Whatever could
happen next, in any order, is a move:

    train     finish the step under way (coupled: once all have begun it), or ask the gate
    hear      the background thread hears the notice and proposes
    propose   the outcome of the proposals reaches it; it confirms
    conclude  the outcome of the confirmations reaches it
    die       the process is gone, with what it knew; rounds it was missing in are broken

An outcome exists once all have arrived, is the same for all, and reaches them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.agreement import Agreement, Gate, TimeLeft, choose_save, margin
from strata.errors import InvalidArgument, Refused
from tests.unit.core.agreement_models import Rounds, reachable, with_arrival, with_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    agreement: Agreement = field(default_factory=Agreement)
    completed: int = 0
    heard: int = 0
    """How many rounds it has arrived at."""
    told: int = 0
    """How many outcomes it has taken."""
    end: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    ranks: tuple[Rank, ...]
    rounds: Rounds = ()
    broken: int = 0
    """The number of the round that was broken, from 1; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    coupled: bool = True
    last: int = 6
    deaths: bool = False


def put(model: Model, index: int, rank: Rank) -> Model:
    return replace(model, ranks=with_rank(model.ranks, index, rank))


def arrive(model: Model, index: int, number: int, payload: bytes) -> Model:
    return replace(model, rounds=with_arrival(model.rounds, number, index, payload))


def moves(model: Model, rules: Rules) -> Iterator[tuple[str, Model]]:
    for index, rank in enumerate(model.ranks):
        if rank.end in {"died", "done", "stopped"}:
            continue
        yield from trains(model, index, rank, rules)
        yield from agrees(model, index, rank)
        if rules.deaths and not any(r.end == "died" for r in model.ranks):
            yield f"{index} dies", put(model, index, replace(rank, end="died"))


def trains(model: Model, index: int, rank: Rank, rules: Rules) -> Iterator[tuple[str, Model]]:
    begun = rank.agreement.begun
    if rank.completed < begun:
        met = all(r.agreement.begun >= begun and r.end != "died" for r in model.ranks)
        if met or not rules.coupled:
            yield f"{index} finishes {begun}", put(model, index, replace(rank, completed=begun))
        return
    if rank.completed >= rules.last:
        yield f"{index} is done", put(model, index, replace(rank, end="done"))
        return
    agreement, gate = rank.agreement.begin(rank.completed)
    if gate is Gate.GO:
        yield f"{index} begins {agreement.begun}", put(model, index, replace(rank, agreement=agreement))
    elif gate is Gate.STOP:
        yield f"{index} stops", put(model, index, replace(rank, end="stopped"))


def agrees(model: Model, index: int, rank: Rank) -> Iterator[tuple[str, Model]]:
    size, agreement = len(model.ranks), rank.agreement
    if rank.heard == rank.told:  # between rounds: the background thread is free to go on
        if agreement.agreed is None and not model.broken and rank.heard % 2 == 0:
            agreement, payload = agreement.propose()
            moved = put(model, index, replace(rank, agreement=agreement, heard=rank.heard + 1))
            yield f"{index} proposes", arrive(moved, index, rank.heard + 1, payload)
        return
    brought = model.rounds[rank.heard - 1]
    gone = {i for i, r in enumerate(model.ranks) if r.end in {"died", "done"}}
    if len(brought) < size and (model.broken == rank.heard or gone - {i for i, _ in brought}):
        given_up = replace(rank, agreement=agreement.give_up(), told=rank.heard)
        yield f"{index} gives up", replace(put(model, index, given_up), broken=rank.heard)
    if len(brought) < size or model.broken == rank.heard:
        return
    if rank.heard % 2:
        agreement, payload = agreement.confirm(dict(brought), ranks=size)
        moved = put(model, index, replace(rank, agreement=agreement, told=rank.heard, heard=rank.heard + 1))
        yield f"{index} confirms", arrive(moved, index, rank.heard + 1, payload)
    else:
        agreement = agreement.conclude(dict(brought), ranks=size)
        yield f"{index} concludes", put(model, index, replace(rank, agreement=agreement, told=rank.heard))


def check(model: Model) -> None:
    agreed = {r.agreement.agreed for r in model.ranks if r.agreement.agreed is not None}
    assert len(agreed) <= 1, "two steps were agreed"
    for step in agreed:
        for rank in model.ranks:
            assert rank.agreement.begun <= step, "a rank has begun a step after the common one"
            assert rank.end != "stopped" or rank.completed == step


def check_end(model: Model, rules: Rules) -> str:
    """Nothing can move any more: say how it ended, if it may end so."""
    ends = {rank.end for rank in model.ranks}
    if "died" in ends:
        return "died"
    assert ends in ({"stopped"}, {"done"}), f"stuck: {model}"
    if ends == {"done"}:
        assert all(rank.completed == rules.last for rank in model.ranks)
    return ends.pop()


def search(size: int, rules: Rules) -> tuple[set[str], int]:
    """Visit every state that can be reached; return how it can end, and how many states there are."""
    ends, states = set(), 0
    begin = Model(tuple(Rank() for _ in range(size)))
    for model, is_end in reachable(begin, lambda model: (after for _, after in moves(model, rules))):
        check(model)
        states += 1
        if is_end:
            ends.add(check_end(model, rules))
    return ends, states


@pytest.mark.parametrize(("coupled", "last"), [(True, 6), (False, 5)])
def test_two_ranks_stop_together_or_finish_together_whatever_the_order(coupled: bool, last: int) -> None:
    ends, states = search(2, Rules(coupled=coupled, last=last))
    assert ends == {"stopped", "done"}
    assert states > 1000  # the search is one


def test_three_ranks_that_train_together() -> None:
    ends, _ = search(3, Rules(last=3))
    assert ends == {"stopped", "done"}


def test_a_death_at_any_moment_leaves_at_most_one_common_step() -> None:
    ends, _ = search(2, Rules(last=5, deaths=True))
    assert "died" in ends
    assert "stopped" in ends


def test_the_search_finds_a_rank_that_looks_before_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a rank that says "ok" and does not hold."""

    def careless(self: Agreement, brought: dict[int, bytes], *, ranks: int) -> tuple[Agreement, bytes]:
        state, payload = confirm(self, brought, ranks=ranks)
        return replace(state, hold=None), payload

    confirm = Agreement.confirm
    monkeypatch.setattr(Agreement, "confirm", careless)
    with pytest.raises(AssertionError, match="begun a step after the common one"):
        search(2, Rules(last=7))


def test_the_search_finds_a_rank_that_holds_after_a_round_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: nobody comes to let it go."""
    monkeypatch.setattr(Agreement, "give_up", lambda self: self)
    with pytest.raises(AssertionError, match="stuck"):
        search(2, Rules(coupled=False, last=5))


# -- one rank's part ----------------------------------------------------------------------------


def agreed(*begun: int) -> list[Agreement]:
    """Return the ranks after one attempt in which nobody trained on."""
    ranks = [Agreement(begun=b) for b in begun]
    proposed = [rank.propose() for rank in ranks]
    brought = {i: payload for i, (_, payload) in enumerate(proposed)}
    confirmed = [rank.confirm(brought, ranks=len(ranks)) for rank, _ in proposed]
    answers = {i: payload for i, (_, payload) in enumerate(confirmed)}
    return [rank.conclude(answers, ranks=len(ranks)) for rank, _ in confirmed]


@given(st.lists(st.integers(min_value=0, max_value=10**12), min_size=1, max_size=8))
def test_the_first_attempt_aims_two_steps_beyond_the_furthest(begun: list[int]) -> None:
    assert {rank.agreed for rank in agreed(*begun)} == {max(begun) + 2}


def test_a_rank_that_ran_past_makes_everybody_go_on_and_aim_further() -> None:
    slow, fast = (Agreement(begun=b).propose() for b in (10, 10))
    brought = {0: slow[1], 1: fast[1]}
    held, ok = slow[0].confirm(brought, ranks=2)
    ran = fast[0].begin(12)[0]
    past, no = ran.confirm(brought, ranks=2)
    assert held.hold == 12
    assert held.begin(11)[1] is Gate.GO
    assert held.begin(12)[1] is Gate.WAIT
    assert past.hold is None
    again = held.conclude({0: ok, 1: no}, ranks=2)
    assert (again.agreed, again.begin(12)[1]) == (None, Gate.GO)
    assert margin(again.propose()[0].attempt) == 4


def test_the_margin_doubles_and_is_bounded() -> None:
    assert [margin(attempt) for attempt in (1, 2, 3, 4)] == [2, 4, 8, 16]
    assert margin(10**6) == 2 << 20


def test_after_the_common_step_a_rank_stops_and_before_it_trains() -> None:
    (rank,) = agreed(5)
    assert rank.begin(6) == (replace(rank, begun=7), Gate.GO)
    assert rank.begin(7)[1] is Gate.STOP
    assert rank.begin(8)[1] is Gate.STOP


def test_what_was_agreed_survives_giving_up_and_a_hold_does_not() -> None:
    (rank,) = agreed(5)
    assert rank.give_up() == rank
    assert Agreement(begun=3, attempt=1, hold=5).give_up().hold is None


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"", Refused),
        (b"\xff", Refused),
        (b"[1]", Refused),
        (b'{"v":2,"attempt":1,"begun":3}', Refused),
        (b'{"v":1,"attempt":2,"begun":3}', Refused),
        (b'{"v":1,"attempt":1}', InvalidArgument),
        (b'{"v":1,"attempt":1,"begun":-1}', InvalidArgument),
        (b'{"v":1,"attempt":1,"begun":true}', InvalidArgument),
        (b'{"v":1,"attempt":1,"begun":"3"}', InvalidArgument),
    ],
)
def test_what_another_program_brings_is_refused(payload: bytes, error: type[Exception]) -> None:
    rank, mine = Agreement(begun=3).propose()
    with pytest.raises(error, match="rank 1"):
        rank.confirm({0: mine, 1: payload}, ranks=2)


def test_a_rank_that_brings_nothing_is_named() -> None:
    rank, mine = Agreement().propose()
    with pytest.raises(Refused, match=r"ranks \[1\] brought nothing"):
        rank.confirm({0: mine}, ranks=2)


# -- the save at the common step ----------------------------------------------------------------


def chosen(*ranks: tuple[int, int]) -> tuple[bool, str]:
    brought = {i: TimeLeft(left_ms=left, cost_ms=cost).encode() for i, (left, cost) in enumerate(ranks)}
    choice = choose_save(brought, ranks=len(ranks))
    return choice.save, choice.reason


@pytest.mark.parametrize(
    ("ranks", "save", "reason"),
    [
        ([(30_000, 0), (29_000, 0)], True, "29.0 s are left; no save was measured yet"),
        ([(30_000, 4000), (29_000, 0)], True, "29.0 s are left; a save takes about 4.0 s"),
        ([(30_000, 100), (3000, 4000)], False, "a save takes about 4.0 s, and 3.0 s are left"),
        ([(30_000, 100), (0, 0)], False, "no time is left to save"),
        ([(30_000, 100), (-5, 0)], False, "no time is left to save"),
    ],
)
def test_a_save_is_begun_only_when_every_rank_has_the_time(
    ranks: list[tuple[int, int]], save: bool, reason: str
) -> None:
    assert chosen(*ranks) == (save, reason)
