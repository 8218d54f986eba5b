"""Lists in pages: an answer fits into one message of bounded size, however long the list is.

A page's token is the key of its last item, so any replica can go on, and what comes or goes
meanwhile moves nothing else: each item that is there all the time is told exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from strata.core.kv.view import Entry
from strata.errors import InvalidArgument, StaleGeneration
from strata.wire.pages import merge

T = TypeVar("T")

ANSWER_BYTES: Final = 256 << 10
"""What the answer to a unary call may have; `rpc.handlers` holds all of them to it."""
PAGE_BYTES: Final = ANSWER_BYTES - (2 << 10)
"""What a page's items may have: both tokens need room as well."""
MAX_TOKEN: Final = 512


def page(
    items: Iterable[T],
    *,
    key: Callable[[T], str],
    make: Callable[[T], Any],
    size: int,
    token: str,
    page_bytes: int = PAGE_BYTES,
) -> tuple[list[Any], str]:
    """Return the messages after `token` and the next token, "" at the end.

    `size` is how many at most, 0: as many as fit. Keys sort as text, and `items` may come in any
    order. A page holds one item at least.
    """
    if size < 0 or len(token) > MAX_TOKEN:
        raise InvalidArgument("page_size cannot be negative, and page_token is what an answer had")
    found: list[Any] = []
    total = 0
    last = ""
    for item in sorted((item for item in items if key(item) > token), key=key):
        message = make(item)
        total += message.ByteSize() + 8  # its tag and length
        if found and (total > page_bytes or (size and len(found) >= size)):
            return found, last
        found.append(message)
        last = key(item)
    return found, ""


def fill(
    answer: Any, items: Iterable[T], *, key: Callable[[T], str], part: Callable[[T], Any], request: Any
) -> None:
    """Merge into `answer`, which has what is no list, the items of the page that `request` asks for.

    `part` returns an answer with that item alone.
    """
    parts, answer.next_page_token = page(
        items,
        key=key,
        make=part,
        size=request.page_size,
        token=request.page_token,
        page_bytes=PAGE_BYTES - answer.ByteSize(),
    )
    for each in parts:
        merge(answer, each)


def of_state(what: str, token: str, *made_of: Entry[Any] | None) -> str:
    """Return the beginning of the keys of a list that is replaced as a whole: it names what the list is made of now.

    `StaleGeneration` for a token of another one: pages of two of them are no list. What is written has a greater
    revision than all there was, and what is deleted is missing in the count, so no two states are named alike.
    """
    there = [entry.mod_revision for entry in made_of if entry is not None]
    prefix = f"{max(there, default=0):020d}.{len(there)}/"
    if token and not token.startswith(prefix):
        raise StaleGeneration(
            f"{what} was replaced, or went, between two pages", hint="begin again, without page_token"
        )
    return prefix
