"""Paged lists: an answer fits into one message of bounded size, however long the list is.

A page's token is the key of its last item, so any replica can return the next page. Items that are created or deleted
between two pages do not shift the others: each item that exists throughout is listed exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from strata.core.kv.view import Entry
from strata.errors import InvalidArgument, StaleGeneration
from strata.wire.pages import merge

T = TypeVar("T")

ANSWER_BYTES: Final = 256 << 10
"""The maximum size of a unary call's answer; `rpc.handlers` enforces it."""
PAGE_BYTES: Final = ANSWER_BYTES - (2 << 10)
"""The maximum size of a page's items; the rest is for the two tokens."""
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
    """Return the messages after `token` and the next token, which is "" at the end.

    `size` is the maximum number of items; 0 means as many as fit. Keys sort as text, and `items` may come in any
    order. A page holds at least one item.
    """
    if size < 0 or len(token) > MAX_TOKEN:
        raise InvalidArgument("page_size cannot be negative, and page_token comes from an answer")
    found: list[Any] = []
    total = 0
    last = ""
    for item in sorted((item for item in items if key(item) > token), key=key):
        message = make(item)
        total += message.ByteSize() + 8  # the tag and length of its field
        if found and (total > page_bytes or (size and len(found) >= size)):
            return found, last
        found.append(message)
        last = key(item)
    return found, ""


def fill(
    answer: Any, items: Iterable[T], *, key: Callable[[T], str], part: Callable[[T], Any], request: Any
) -> None:
    """Add the page of items that `request` asks for to `answer`, whose other fields are already set.

    `part` returns an answer that contains only the given item.
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
    """Return a prefix for the keys of a list that is only replaced as a whole; it identifies the state of `made_of`.

    Raise `StaleGeneration` for a token of another state: pages of two states do not form one list. No two
    states have the same prefix: a write has a greater revision than all before it, and a deletion lowers the
    count.
    """
    revisions = [entry.mod_revision for entry in made_of if entry is not None]
    prefix = f"{max(revisions, default=0):020d}.{len(revisions)}/"
    if token and not token.startswith(prefix):
        raise StaleGeneration(
            f"{what} was replaced or deleted between two pages", hint="begin again, without page_token"
        )
    return prefix
