"""What the models of the agreement have in common: ranks side by side, rounds, and a search of every order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

R = TypeVar("R")
M = TypeVar("M", bound=Hashable)

Rounds = tuple[tuple[tuple[int, bytes], ...], ...]
"""What each rank brought, round by round; the first has number 1."""


def with_rank(ranks: tuple[R, ...], index: int, rank: R) -> tuple[R, ...]:
    """Return the ranks with one of them changed."""
    return (*ranks[:index], rank, *ranks[index + 1 :])


def with_arrival(rounds: Rounds, number: int, index: int, payload: bytes) -> Rounds:
    """Return the rounds with one more arrival."""
    every = [*rounds, *([()] * (number - len(rounds)))]
    every[number - 1] = tuple(sorted((*every[number - 1], (index, payload))))
    return tuple(every)


def reachable(begin: M, moves: Callable[[M], Iterable[M]]) -> Iterator[tuple[M, bool]]:
    """Yield every state that can be reached, once, and whether nothing can move in it any more."""
    seen, todo = {begin}, [begin]
    while todo:
        model = todo.pop()
        following = list(moves(model))
        yield model, not following
        for after in following:
            if after not in seen:
                seen.add(after)
                todo.append(after)
