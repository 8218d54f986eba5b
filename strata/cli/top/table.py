"""Tables as wide as the terminal: columns that shrink, or are dropped, if not all fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from strata.cli.top.lines import BOLD, DIM, line
from strata.observe.words import printable

Styled = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table whose rows are identified by number."""

    name: str
    width: int
    """The width of the widest cell, the title included."""
    cell: Callable[[int], Styled]
    least: int = 0
    """The smallest width to which the column may shrink; 0: the column does not shrink."""
    left: bool = False
    goes: int = 0
    """If not all columns fit, the column with the highest number is dropped first; 0: never dropped."""


def fitted(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit into `width`, with two spaces between them."""
    kept = list(columns)
    while True:
        over = sum(column.width for column in kept) + 2 * (len(kept) - 1) - width
        shrunk: list[Column] = []
        for column in kept:
            less = max(0, min(over, column.width - column.least)) if column.least else 0
            over -= less
            shrunk.append(replace(column, width=column.width - less))
        goer = max(kept, key=lambda column: column.goes)
        if over <= 0 or not goer.goes:
            return shrunk
        kept.remove(goer)


def heading(columns: Sequence[Column], width: int, *, sorted_by: str = "", down: bool = False) -> Text:
    """Return the titles, with an arrow at the column by which the rows are sorted."""
    parts: list[str | Styled] = []
    for column in columns:
        mark = ("▼" if down else "▲") if column.name == sorted_by else ""
        title = _sized(column.name + mark, column)
        parts += [(title, f"{BOLD} underline" if mark else BOLD), "  "]
    return line(width, *parts[:-1])


def row(columns: Sequence[Column], number: int, width: int, *, style: str = "", fill: bool = False) -> Text:
    """Return a row; `fill` pads it to the terminal's width, for highlighting."""
    parts: list[str | Styled] = []
    for column in columns:
        words, own = column.cell(number)
        parts += [(_sized(printable(words), column), own or (DIM if words == "-" else "")), "  "]
    text = line(width, *parts[:-1], style=style)
    if fill:
        text.append(" " * (width - text.cell_len))
    return text


def _sized(words: str, column: Column) -> str:
    wide = cell_len(words)
    if wide > column.width:
        return set_cell_size(words, max(0, column.width - 1)) + "…" if column.width else ""
    blanks = " " * (column.width - wide)
    return words + blanks if column.left else blanks + words
