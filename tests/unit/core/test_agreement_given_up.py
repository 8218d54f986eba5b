"""A rank that gives up a hold takes its promise back, and nobody stops for good where it went on.

The model of `test_agreement`, with the moves that a world to follow adds. All happen in any order:

    gives up   a trainer that holds has waited for long: it does so no longer, and trains on
    meets      a trainer that stops is at the meeting of its attempt; a background thread that learns
               that its trainer is past the step says so there
    parts      the outcome of a meeting reaches one: all save and stop, or all go on and agree anew
    late       a meeting to which not all have come is over for all, whether they hear that or hear
               nothing: they go on and agree anew; only where one cannot come any more they train on
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from strata.core.agreement import Agreement, Gate, TimeLeft, choose_save
from tests.unit.core.agreement_models import Rounds, reachable, with_arrival, with_rank

HERE, WENT_ON = TimeLeft(left_ms=1000).encode(), TimeLeft(went_on=True).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    agreement: Agreement = field(default_factory=Agreement)
    completed: int = 0
    heard: int = 0
    told: int = 0
    agreeing: bool = True
    gave_up: bool = False
    meets: int = 0
    """The attempt at whose meeting its trainer is; 0: at none."""
    says: int = 0
    """The same of its background thread."""
    end: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    ranks: tuple[Rank, ...]
    rounds: Rounds = ()
    meetings: Rounds = ()
    late: frozenset[int] = frozenset()
    """The meetings to which not all came in time."""
    broken: frozenset[int] = frozenset()
    """Those to which one cannot come any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    last: int
    coupled: bool = True
    late: bool = False


def put(model: Model, index: int, rank: Rank) -> Model:
    return replace(model, ranks=with_rank(model.ranks, index, rank))


def moves(model: Model, rules: Rules) -> Iterator[Model]:
    for index, rank in enumerate(model.ranks):
        if rank.end:
            continue
        yield from trains(model, index, rank, rules)
        yield from parts(model, index, rank, rules)
        yield from agrees(model, index, rank)


def trains(model: Model, index: int, rank: Rank, rules: Rules) -> Iterator[Model]:
    begun = rank.agreement.begun
    if rank.meets:
        return
    if rank.completed < begun:
        if not rules.coupled or all(r.agreement.begun >= begun for r in model.ranks):
            yield put(model, index, replace(rank, completed=begun))
        return
    if rank.completed >= rules.last:
        yield put(model, index, replace(rank, end="done"))
        return
    agreement, gate = rank.agreement.begin(rank.completed)
    if gate is Gate.GO:
        yield put(model, index, replace(rank, agreement=agreement))
    elif gate is Gate.STOP:
        met = with_arrival(model.meetings, agreement.attempt, index, HERE)
        yield replace(put(model, index, replace(rank, meets=agreement.attempt)), meetings=met)
    elif not rank.gave_up:
        yield put(model, index, replace(rank, agreement=agreement.give_up(), gave_up=True))


def parts(model: Model, index: int, rank: Rank, rules: Rules) -> Iterator[Model]:
    for number in {rank.meets, rank.says} - {0}:
        here = model.meetings[number - 1]
        if number in model.late | model.broken:
            yield put(model, index, trained_on(rank, anew=number in model.late))
        elif len(here) == len(model.ranks):
            choice = choose_save(dict(here), ranks=len(model.ranks))
            if rank.says:
                yield put(model, index, replace(rank, says=0))
            elif choice.stop:
                yield put(model, index, replace(rank, meets=0, end="stopped"))
            else:
                anew = replace(rank, meets=0, agreement=rank.agreement.forget(), agreeing=True)
                yield put(model, index, anew)
        elif any(r.end for i, r in enumerate(model.ranks) if i not in dict(here)):
            broken = model.broken | {number}
            yield replace(put(model, index, trained_on(rank, anew=False)), broken=broken)
        elif rules.late:
            yield replace(put(model, index, trained_on(rank, anew=True)), late=model.late | {number})


def trained_on(rank: Rank, *, anew: bool) -> Rank:
    if rank.says:
        return replace(rank, says=0)
    return replace(rank, meets=0, agreement=rank.agreement.forget(), agreeing=anew)


def agrees(model: Model, index: int, rank: Rank) -> Iterator[Model]:
    agreement, size = rank.agreement, len(model.ranks)
    if not rank.agreeing or rank.says:
        return
    if rank.heard == rank.told:
        agreement, payload = agreement.propose()
        moved = put(model, index, replace(rank, agreement=agreement, heard=rank.heard + 1))
        yield replace(moved, rounds=with_arrival(model.rounds, rank.heard + 1, index, payload))
        return
    brought = dict(model.rounds[rank.heard - 1])
    if len(brought) < size:
        if any(r.end for i, r in enumerate(model.ranks) if i not in brought):  # the round is broken
            yield put(model, index, replace(rank, agreement=agreement.give_up(), agreeing=False))
        return
    if rank.heard % 2:
        agreement, payload = agreement.confirm(brought, ranks=size)
        moved = put(model, index, replace(rank, agreement=agreement, told=rank.heard, heard=rank.heard + 1))
        yield replace(moved, rounds=with_arrival(model.rounds, rank.heard + 1, index, payload))
        return
    agreement = agreement.conclude(brought, ranks=size)
    concluded = replace(rank, agreement=agreement, told=rank.heard)
    if agreement.went_on:
        met = with_arrival(model.meetings, agreement.attempt, index, WENT_ON)
        yield replace(put(model, index, replace(concluded, says=agreement.attempt)), meetings=met)
    else:
        yield put(model, index, replace(concluded, agreeing=agreement.agreed is None))


def check(model: Model) -> None:
    for rank in model.ranks:
        agreed = rank.agreement.agreed
        assert agreed is None or rank.agreement.begun <= agreed, "a rank has begun a step after its last"
    stopped = {rank.completed for rank in model.ranks if rank.end == "stopped"}
    assert len(stopped) <= 1, "two ranks saved different steps"
    for step in stopped:
        assert all(rank.agreement.begun <= step for rank in model.ranks), "one saved where another went on"


def search(size: int, rules: Rules) -> tuple[set[str], int]:
    """Visit every state that can be reached; return how it can end, and how many states there are."""
    ends, states = set(), 0
    begin = Model(tuple(Rank() for _ in range(size)))
    for model, is_end in reachable(begin, lambda model: moves(model, rules)):
        check(model)
        states += 1
        if is_end:
            end = {rank.end for rank in model.ranks}
            assert end in ({"stopped"}, {"done"}), f"stuck: {model}"
            went_on = any(rank.gave_up for rank in model.ranks)
            ends.add(f"{end.pop()}{' after all' if went_on else ''}")
    return ends, states


ALL = {"done", "done after all", "stopped", "stopped after all"}


@pytest.mark.parametrize("rules", [Rules(last=4), Rules(last=4, late=True), Rules(last=3, coupled=False)])
def test_all_stop_at_one_step_or_none_does_though_ranks_give_up(rules: Rules) -> None:
    ends, states = search(2, rules)
    assert ends == ALL
    assert states > 1000


def test_the_search_finds_a_rank_that_takes_up_what_it_has_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: it concludes that it stops where it went on."""

    right = Agreement.conclude

    def conclude(self: Agreement, brought: dict[int, bytes], *, ranks: int) -> Agreement:
        return replace(right(replace(self, begun=0), brought, ranks=ranks), begun=self.begun)

    monkeypatch.setattr(Agreement, "conclude", conclude)
    with pytest.raises(AssertionError, match="begun a step after its last"):
        search(2, Rules(last=4))


def test_the_search_finds_a_rank_that_drops_what_others_were_told_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault, which this once did: they wait where they stopped, and it waits in its collective."""
    right = Agreement.conclude

    def conclude(self: Agreement, brought: dict[int, bytes], *, ranks: int) -> Agreement:
        return replace(right(self, brought, ranks=ranks), went_on=False)

    monkeypatch.setattr(Agreement, "conclude", conclude)
    with pytest.raises(AssertionError, match="stuck"):
        search(2, Rules(last=4))


def test_the_search_finds_a_rank_that_stops_where_it_hears_nothing_of_a_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault, which this once did: others heard that the meeting was over, and went on."""
    right = trained_on

    def stops(rank: Rank, *, anew: bool) -> Rank:
        hears_nothing = anew and rank.meets and not rank.gave_up
        return replace(rank, meets=0, end="stopped") if hears_nothing else right(rank, anew=anew)

    monkeypatch.setitem(globals(), "trained_on", stops)
    with pytest.raises(AssertionError, match="one saved where another went on"):
        search(2, Rules(last=4, late=True))
