"""Lines of a fixed width, of parts with styles."""

from __future__ import annotations

from rich.text import Text

from strata.observe.words import printable

Part = str | tuple[str, str]
"""Words, or words and their style."""

DIM, BOLD, GOOD, WARN, BAD = "dim", "bold", "green", "yellow", "bold red"
BAR = "reverse"
LABEL = 10
"""How wide the names of lines are."""


def line(width: int, *parts: Part, style: str = "") -> Text:
    """Return the parts as a line that is no wider than `width`; an ellipsis ends one that is cut."""
    text = Text(style=style, no_wrap=True)
    for part in parts:
        words, own = (part, "") if isinstance(part, str) else part
        text.append(printable(words), own or None)
    text.truncate(max(0, width), overflow="ellipsis")
    return text


def labelled(width: int, label: str, *parts: Part) -> Text:
    """Return a line that begins with what it is about."""
    return line(width, (label.ljust(LABEL), BOLD), *parts)


def spread(width: int, left: tuple[Part, ...], right: tuple[Part, ...], *, style: str = "") -> Text:
    """Return a line with parts at both ends. The right ones stay whole."""
    end = line(width, *right)
    begin = line(width - end.cell_len - 1, *left)
    begin.append(" " * (width - begin.cell_len - end.cell_len))
    begin.append_text(end)
    begin.style = style
    return begin


def wrapped(width: int, words: str, *, first: str, most: int, style: str = "") -> list[Text]:
    """Return a sentence in at most `most` lines; the ones after the first are indented as far as `first` is wide."""
    lines: list[Text] = []
    left = printable(words)
    room = max(8, width - len(first))
    while left and len(lines) < most:
        if len(left) <= room or len(lines) == most - 1:
            piece, left = left, ""
        else:
            cut = left.rfind(" ", 0, room + 1)
            piece, left = (left[:cut], left[cut + 1 :]) if cut > 0 else (left[:room], left[room:])
        lines.append(line(width, (first if not lines else " " * len(first), style), (piece, style)))
    return lines
