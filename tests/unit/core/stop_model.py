"""A searchable model of a generation with a stop notice: ranks, coordinators, the leader, one notice.

Every event that can happen next is a move:

    notice      the leader writes a scale notice, as a member has joined; then an operator's request widens it
    rank        receives the notice, arrives at a meeting, takes its outcome, begins or finishes a step (together
                with the other ranks), saves its part, leaves, is ended by its agent after the next head, dies
    outcome     of a meeting at which all have arrived, or can no longer all arrive: written once, durable
    commit      of the step that all ranks have saved
    loss        of all coordinators: arrivals are lost, and sent again when a coordinator is back; written keys stay
    head        the leader ends the generation

`faults` are planted: each breaks a rule of the protocol, and the search must find it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from strata.core.stop.last_step import Agreement, Decision, NextStep, read_decision

NOTHING, SCALE, DRAIN, PREEMPT = range(4)
"""Notices, each wider than the one before. DRAIN names rank 0."""
BROKEN: Final[tuple[tuple[int, bytes], ...]] = ((-1, b""),)
"""The outcome of a meeting at which some rank could not arrive."""

Arrivals = tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank. `meetings`: number of its arrivals; `told`: number of outcomes it took; `sent`: its last payload."""

    agreement: Agreement = field(default_factory=Agreement)
    completed: int = 0
    meetings: int = 0
    reported: int = 0
    sent: bytes = b""
    received: int = NOTHING
    saved: bool = False
    end: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """One state. `plan`, `head`: (whether the next head restores the common step, the notice that it knows)."""

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
    """Which events are possible.

    `late`: the leader may stop waiting at any moment; `deadlines`: ranks leave at their deadlines; `exits`: rank 0
    exits with 75 by itself before a world of another size; `cannot`: rank 0 can save nothing.
    """

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
    """An invariant does not hold."""


def leaves(notice: int, index: int) -> bool:
    return notice == PREEMPT or (notice == DRAIN and index == 0)


def put(model: Model, index: int, rank: Rank) -> Model:
    return replace(model, ranks=(*model.ranks[:index], rank, *model.ranks[index + 1 :]))


def decided(model: Model) -> list[Decision]:
    """Return the decision of every outcome that has one."""
    found = (read_decision(dict(one), ranks=len(model.ranks)) for one in model.outcomes if one is not BROKEN)
    return [one for one in found if one is not None]


# -- moves --------------------------------------------------------------------------------------


def moves(model: Model, rules: Rules) -> Iterator[Model]:
    """Yield the state after each possible event. After the head ranks do nothing new until their agents end them."""
    if model.head is not None:
        return
    for index, rank in enumerate(model.ranks):
        if rank.end:
            continue
        if rank.received < model.notice and model.up:
            yield put(model, index, received(rank, model.notice, rules))
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


def received(rank: Rank, notice: int, rules: Rules) -> Rank:
    if "S is chosen again" in rules.faults and rank.agreement.decision is not None:
        begun, number = rank.agreement.begun, rank.agreement.round
        return replace(rank, received=notice, agreement=Agreement(begun=begun, round=number + 1))
    return replace(rank, received=notice)


def trains(model: Model, index: int, rank: Rank, rules: Rules) -> Iterator[Model]:
    begun = rank.agreement.begun
    if rank.completed < begun:
        if rank.completed >= rules.last:
            yield put(model, index, replace(rank, end="done"))
        elif all(one.agreement.begun >= begun and one.end != "died" for one in model.ranks):
            # atomic with the check of `begin`, as in `Run`
            agreement, _ = rank.agreement.begin(begun)
            yield put(model, index, replace(rank, completed=begun, agreement=agreement))
        return
    agreement, next_step = rank.agreement.begin(rank.completed)
    leaver = leaves(rank.received, index)
    if leaver and rules.deadlines:
        yield put(model, index, replace(rank, end="left"))
    if next_step is NextStep.GO:
        yield put(model, index, replace(rank, agreement=agreement))
    elif next_step is NextStep.WAIT and "a local release" in rules.faults:
        yield put(model, index, replace(rank, agreement=agreement.released()))
    elif next_step is NextStep.STOP:
        saves = agreement.decision is not None and agreement.decision.save
        if saves and not rank.saved and model.up:
            yield put(model, index, replace(rank, saved=True))
        if (leaver or "a staying rank exits" in rules.faults) and model.up and (model.committed or not saves):
            yield put(model, index, replace(rank, end="left"))


def agrees(model: Model, index: int, rank: Rank, rules: Rules) -> Iterator[Model]:
    size, agreement = len(model.ranks), rank.agreement
    if rank.reported == rank.meetings:
        over = agreement.decision is not None or BROKEN in model.outcomes[: rank.reported]
        if rank.received and not over and rank.reported % 2 == 0:
            yield arrives(model, index, rank, agreement.propose(can_save=not (rules.cannot and index == 0)))
        return
    if len(model.outcomes) < rank.meetings or not model.up:
        return
    outcome, taken = model.outcomes[rank.reported], replace(rank, reported=rank.reported + 1)
    if outcome is BROKEN:
        yield put(model, index, replace(taken, agreement=agreement.released()))
    elif rank.meetings % 2:
        agreement, payload = agreement.answer(dict(outcome), ranks=size)
        if "one round only" in rules.faults:
            agreement = replace(agreement, decision=agreement.offer, hold=None)
        yield arrives(model, index, replace(taken, agreement=agreement), payload)
    else:
        yield put(model, index, replace(taken, agreement=agreement.conclude(dict(outcome), ranks=size)))


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
    """Yield the states after each write that coordinators may make."""
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
    """Return whether the leader ends the generation."""
    if any(rank.end == "died" for rank in model.ranks):
        return True
    if not model.notice or all(rank.end == "done" for rank in model.ranks):
        return False
    if model.notice == SCALE and any(rank.end == "done" for rank in model.ranks):
        return False  # this rank is about to finish
    if rules.late or model.committed or any(not one.save for one in decided(model)):
        return True
    leavers = [rank for index, rank in enumerate(model.ranks) if leaves(model.notice, index)] or model.ranks
    return all(rank.end for rank in leavers)


# -- invariants ---------------------------------------------------------------------------------


def check(model: Model) -> None:
    """Raise `Violation` if an invariant does not hold."""
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
    """Return how a state without moves ended; raise `Violation` if a rank waits forever."""
    if model.head is None:
        if any(rank.end != "done" for rank in model.ranks):
            raise Violation(f"a rank waits for ever, or the leader does: {model}")
        return "done"
    return "saved" if model.committed else "not saved"


def canonical(model: Model) -> Model:
    """Return the same state with its ranks in a fixed order, for rules that name no rank."""
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
    """Visit every reachable state; return the possible ends and the number of states."""
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
