"""Reassembly of an answer that comes in pages.

A page's lists continue those of the page before. Only the first page has the fields that are not lists. So the merged
pages are the whole answer, which would not have fitted into one message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from google.protobuf.message import Message

from strata.errors import StaleGeneration

TRIES: Final = 5
"""The most restarts of an answer whose subject changed between two pages."""


class Pages:
    """Collects the pages of the answer to `request`, a request for a list."""

    def __init__(self, request: Message) -> None:
        self._first = request
        self._restarts = 0
        self._begin()

    def _begin(self) -> None:
        self.request: Any = type(self._first)()
        self.request.CopyFrom(self._first)
        self.answer: Any = None

    def take(self, page: Any) -> bool:
        """Add a page, the answer to the present `request`; return whether another page must be requested."""
        self.request.page_token = page.next_page_token
        if self.answer is None:
            self.answer = page
        else:
            merge(self.answer, page)
        self.answer.next_page_token = ""
        return bool(self.request.page_token)

    def outdated(self, error: StaleGeneration) -> None:
        """Begin again, because the pages so far show an outdated state; raise `error` after `TRIES` restarts."""
        self._restarts += 1
        if self.answer is None or self._restarts >= TRIES:
            raise error
        self._begin()


def whole(ask: Callable[[Any], Any], request: Message) -> Any:
    """Return the answer to a request for a list with all of its pages; `ask` returns one page."""
    pages = Pages(request)
    while True:
        try:
            if not pages.take(ask(pages.request)):
                return pages.answer
        except StaleGeneration as error:
            pages.outdated(error)


async def whole_async(ask: Callable[[Any], Awaitable[Any]], request: Message) -> Any:
    """Return the answer to a request for a list with all of its pages; `ask` returns one page."""
    pages = Pages(request)
    while True:
        try:
            if not pages.take(await ask(pages.request)):
                return pages.answer
        except StaleGeneration as error:
            pages.outdated(error)


def merge(into: Any, page: Any) -> None:
    """Merge a page. In a map of lists the lists are continued; protobuf alone would replace them."""
    continued = [
        (getattr(into, field.name), getattr(page, field.name))
        for field in page.DESCRIPTOR.fields
        if field.message_type is not None
        and field.message_type.GetOptions().map_entry
        and field.message_type.fields_by_name["value"].message_type is not None
    ]
    before = [{key: _copy(held[key]) for key in more if key in held} for held, more in continued]
    into.MergeFrom(page)
    for (held, more), kept in zip(continued, before, strict=True):
        for key, value in kept.items():
            value.MergeFrom(more[key])
            held[key].CopyFrom(value)


def _copy(message: Any) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    return made
