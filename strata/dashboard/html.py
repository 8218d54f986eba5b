"""HTML from calls: what is not markup already is escaped, so that nothing can be forgotten.

`tag("td", name)` escapes `name` whatever it is; only what `tag` and `markup` return is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from strata.observe.words import printable

Child = object
_VOID: Final = frozenset({"meta", "link", "br"})


class Markup:
    """Text that is HTML already."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an element. An attribute of None or False is left out; a closing `_` of a name is dropped."""
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escaped(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{_joined(children)}</{name}>")


def join(children: Iterable[Child], between: str = "") -> Markup:
    """Return the children one after the other."""
    return Markup(_escaped(between).join(_text(child) for child in children))


def _joined(children: Iterable[Child]) -> str:
    return "".join(map(_text, children))


def _text(child: Child) -> str:
    if child is None:
        return ""
    return child.text if isinstance(child, Markup) else _escaped(child)


def _escaped(value: object) -> str:
    return escape(printable(str(value)), quote=True)
