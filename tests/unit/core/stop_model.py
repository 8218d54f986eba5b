"""A generation that is asked to stop, as a model that can be searched: ranks, coordinators, the leader, one notice.

Whatever could happen next, in any order, is a move:

    notice      the leader asks to scale, as somebody has joined; then somebody asks for more
    rank        hears the notice, takes part in a meeting, takes its outcome, begins or finishes a step (together
                with the others), saves its part, leaves, hears the next head and is ended by its agent, dies
    outcome     of a meeting that all have come to, or that cannot be met any more: written once, and durable
    commit      of the step that all ranks have saved
    loss        of all coordinators: arrivals are gone, and are sent again when one is back; what is written stays
    head        the leader ends the generation

`faults` are planted: a rule of the protocol is broken, and the search must find that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from strata.core.stop.last_step import Agreement, Decision, NextStep, read_decision

NOTHING, SCALE, DRAIN, PREEMPT = range(4)
"""Notices, each wider than the one before. DRAIN names rank 0."""
BROKEN: Final[tuple[tuple[int, bytes], ...]] = ((-1, b""),)
"""The outcome of a meeting that somebody could not come to."""

Arrivals = tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank. `meetings`: how many it has come to; `told`: the outcomes it has taken; `sent`: what it brought last."""

    agreement: Agreement = field(default_factory=Agreement)
    completed: int = 0
    meetings: int = 0
    told: int = 0
    sent: bytes = b""
    heard: int = NOTHING
    saved: bool = False
    end: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """One state. `head`: what the next head restores (whether the common step), and the notice that it knows."""

    ranks: tuple[Rank, ...]
    notice: int = NOTHING
    arrivals: Arrivals = ()
    outcomes: tuple[Arrivals, ...] = ()
    committed: bool = False
    up: bool = True
    losses: int = 0
    plan: tuple[bool, int] | None = None
    head: tuple[bool, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What may happen. `late`: the leader waits no longer, at any moment; `deadlines`: ranks leave at theirs; `exits`: rank 0
    ends with code 75 by itself before a world of another size; `cannot`: rank 0 can save nothing."""

    last: int = 3
    begun: int = 1
    notices: tuple[int, ...] = (SCALE, PREEMPT)
    losses: int = 0
    deaths: bool = False
    late: bool = False
    deadlines: bool = False
    exits: bool = False
    cannot: bool = False
    faults: frozenset[str] = frozenset()


class Violation(AssertionError):
    """A promise is broken."""


def leaves(notice: int, index: int) -> bool:
    return notice == PREEMPT or (notice == DRAIN and index == 0)


def put(model: Model, index: int, rank: Rank) -> Model:
    return replace(model, ranks=(*model.ranks[:index], rank, *model.ranks[index + 1 :]))


def decided(model: Model) -> list[Decision]:
    """Return every decision that an outcome says."""
    found = (read_decision(dict(one), ranks=len(model.ranks)) for one in model.outcomes if one is not BROKEN)
    return [one for one in found if one is not None]


# -- moves --------------------------------------------------------------------------------------


def moves(model: Model, rules: Rules) -> Iterator[Model]:
    """Yield what may happen next. After the head ranks are ended one by one: till then they do what they may do without it."""
    if model.head is not None:
        return
    for index, rank in enumerate(model.ranks):
        if rank.end:
            continue
        if rank.heard < model.notice and model.up:
            yield put(model, index, heard(rank, model.notice, rules))
        yield from trains(model, index, rank, rules)
        yield from agrees(model, index, rank, rules)
        if rules.deaths and not any(one.end == "died" for one in model.ranks):
            yield put(model, index, replace(rank, end="died"))
        if rules.exits and index == 0 and model.notice == SCALE:
            stops = "75 is a stop before another size" in rules.faults
            yield put(model, index, replace(rank, end="stopped" if stops else "died"))
    yield from written(model, rules)
    if model.up and model.losses < rules.losses:
        yield replace(model, up=False, losses=model.losses + 1, arrivals=())
    if not model.up:
        yield replace(model, up=True, arrivals=sent_again(model, rules))


def heard(rank: Rank, notice: int, rules: Rules) -> Rank:
    if "S is chosen again" in rules.faults and rank.agreement.decision is not None:
        begun, number = rank.agreement.begun, rank.agreement.round
        return replace(rank, heard=notice, agreement=Agreement(begun=begun, round=number + 1))
    return replace(rank, heard=notice)


def trains(model: Model, index: int, rank: Rank, rules: Rules) -> Iterator[Model]:
    begun = rank.agreement.begun
    if rank.completed < begun:
        if rank.completed >= rules.last:
            yield put(model, index, replace(rank, end="done"))
        elif all(one.agreement.begun >= begun and one.end != "died" for one in model.ranks):
            # in one act with the look at the gate, as `Run` does
            agreement, _ = rank.agreement.begin(begun)
            yield put(model, index, replace(rank, completed=begun, agreement=agreement))
        return
    agreement, gate = rank.agreement.begin(rank.completed)
    leaver = leaves(rank.heard, index)
    if leaver and rules.deadlines:
        yield put(model, index, replace(rank, end="left"))
    if gate is NextStep.GO:
        yield put(model, index, replace(rank, agreement=agreement))
    elif gate is NextStep.WAIT and "a local release" in rules.faults:
        yield put(model, index, replace(rank, agreement=agreement.released()))
    elif gate is NextStep.STOP:
        saves = agreement.decision is not None and agreement.decision.save
        if saves and not rank.saved and model.up:
            yield put(model, index, replace(rank, saved=True))
        if (leaver or "a staying rank exits" in rules.faults) and model.up and (model.committed or not saves):
            yield put(model, index, replace(rank, end="left"))


def agrees(model: Model, index: int, rank: Rank, rules: Rules) -> Iterator[Model]:
    size, agreement = len(model.ranks), rank.agreement
    if rank.told == rank.meetings:
        over = agreement.decision is not None or BROKEN in model.outcomes[: rank.told]
        if rank.heard and not over and rank.told % 2 == 0:
            yield arrives(model, index, rank, agreement.propose(can_save=not (rules.cannot and index == 0)))
        return
    if len(model.outcomes) < rank.meetings or not model.up:
        return
    outcome, told = model.outcomes[rank.told], replace(rank, told=rank.told + 1)
    if outcome is BROKEN:
        yield put(model, index, replace(told, agreement=agreement.released()))
    elif rank.meetings % 2:
        agreement, payload = agreement.answer(dict(outcome), ranks=size)
        if "one round only" in rules.faults:
            agreement = replace(agreement, decision=agreement.offer, hold=None)
        yield arrives(model, index, replace(told, agreement=agreement), payload)
    else:
        yield put(model, index, replace(told, agreement=agreement.conclude(dict(outcome), ranks=size)))


def arrives(model: Model, index: int, rank: Rank, payload: bytes) -> Model:
    moved = put(model, index, replace(rank, meetings=rank.meetings + 1, sent=payload))
    if not model.up:
        return moved  # sent when a coordinator is back
    return replace(moved, arrivals=tuple(sorted((*model.arrivals, (index, payload)))))


def sent_again(model: Model, rules: Rules) -> Arrivals:
    number = len(model.outcomes) + 1
    return tuple(
        (index, rank.sent)
        for index, rank in enumerate(model.ranks)
        if rank.meetings == number and not rank.end
        if index or "a round lost on reconnect" not in rules.faults
    )


def written(model: Model, rules: Rules) -> Iterator[Model]:
    """Yield what coordinators may write."""
    if not model.up:
        return
    size, ranks = len(model.ranks), model.ranks
    yield from (replace(model, notice=one) for one in rules.notices if one > model.notice)
    came = {index for index, _ in model.arrivals}
    if len(came) == size:
        yield replace(model, outcomes=(*model.outcomes, model.arrivals), arrivals=())
    elif came and any(rank.end and index not in came for index, rank in enumerate(ranks)):
        yield replace(model, outcomes=(*model.outcomes, BROKEN), arrivals=())
    if not model.committed and all(rank.saved for rank in ranks):
        yield replace(model, committed=True)
    if "a head that compares nothing" not in rules.faults:
        if ends(model, rules):
            yield replace(model, head=(model.committed, model.notice))
    elif model.plan is not None:
        yield replace(model, head=model.plan)
    elif ends(model, rules):
        yield replace(model, plan=(model.committed, model.notice))


def ends(model: Model, rules: Rules) -> bool:
    """Tell whether the leader ends the generation."""
    if any(rank.end == "died" for rank in model.ranks):
        return True
    if not model.notice or all(rank.end == "done" for rank in model.ranks):
        return False
    if model.notice == SCALE and any(rank.end == "done" for rank in model.ranks):
        return False  # it is about to finish
    if rules.late or model.committed or any(not one.save for one in decided(model)):
        return True
    asked = [rank for index, rank in enumerate(model.ranks) if leaves(model.notice, index)] or model.ranks
    return all(rank.end for rank in asked)


# -- what must hold -----------------------------------------------------------------------------


def check(model: Model) -> None:
    """Raise `Violation` where a promise is broken."""
    found = decided(model)
    if len({one.step for one in found}) > 1 or len(found) > 1:
        raise Violation("S was decided twice in a generation")
    for index, rank in enumerate(model.ranks):
        if rank.agreement.decision is not None and not found:
            raise Violation("a rank stops at a step that no outcome says")
        if any(rank.agreement.begun > one.step for one in found):
            raise Violation("a rank has begun a step after the common one")
        if rank.end == "left" and not leaves(model.notice, index):
            raise Violation("a rank that is to stay has left")
    if model.committed and not all(rank.saved for rank in model.ranks):
        raise Violation("a commit without the part of a rank")
    if model.head is not None and model.head != (model.committed, model.notice):
        raise Violation("a head knows nothing of the commit or of the notice")


def check_end(model: Model) -> str:
    """Nothing can move any more: say how it ended; `Violation` if a rank waits for ever."""
    if model.head is None:
        if any(rank.end != "done" for rank in model.ranks):
            raise Violation(f"a rank waits for ever, or the leader does: {model}")
        return "done"
    return "saved" if model.committed else "not saved"


def canonical(model: Model) -> Model:
    """Return the same state with the ranks in a fixed order, where none of them differs from the others by name."""
    order = sorted(range(len(model.ranks)), key=lambda index: hash(model.ranks[index]))
    if order == sorted(order):
        return model
    new = {old: position for position, old in enumerate(order)}

    def renamed(arrivals: Arrivals) -> Arrivals:
        return BROKEN if arrivals is BROKEN else tuple(sorted((new[i], data) for i, data in arrivals))

    return replace(
        model,
        ranks=tuple(model.ranks[index] for index in order),
        arrivals=renamed(model.arrivals),
        outcomes=tuple(map(renamed, model.outcomes)),
    )


def search(size: int, rules: Rules) -> tuple[set[str], int]:
    """Visit every state that can be reached; return how it can end, and how many states there are."""
    begin = Model(tuple(Rank(agreement=Agreement(begun=rules.begun)) for _ in range(size)))
    seen, todo, ends_ = {begin}, [begin], set()
    named = (
        DRAIN in rules.notices or rules.exits or rules.cannot or "a round lost on reconnect" in rules.faults
    )
    while todo:
        model = todo.pop()
        check(model)
        following = list(moves(model, rules))
        if not following:
            ends_.add(check_end(model))
        for after in following if named else map(canonical, following):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return ends_, len(seen)
