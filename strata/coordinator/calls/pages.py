"""Lists in pages: an answer fits into one message, however long the list is.

A page's token is the key of its last item, so any replica can go on, and what comes or goes
meanwhile moves nothing else: each item that is there all the time is told exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from strata.errors import InvalidArgument

T = TypeVar("T")

PAGE_BYTES: Final = 1 << 20
"""A quarter of what a message may have."""
MAX_TOKEN: Final = 300


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
