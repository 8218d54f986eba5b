"""Lines of text of a fixed width, made from styled parts."""

from __future__ import annotations

from rich.text import Text

from strata.observe.words import printable

Part = str | tuple[str, str]
"""Text, or text and its style."""

DIM, BOLD, GOOD, WARN, BAD = "dim", "bold", "green", "yellow", "bold red"
BAR = "reverse"
LABEL = 10
"""The width of a line's label."""


def line(width: int, *parts: Part, style: str = "") -> Text:
    """Return the parts as a line of at most `width`; a cut line ends with an ellipsis."""
    text = Text(style=style, no_wrap=True)
    for part in parts:
        words, own = (part, "") if isinstance(part, str) else part
        text.append(printable(words), own or None)
    text.truncate(max(0, width), overflow="ellipsis")
    return text


def labelled(width: int, label: str, *parts: Part) -> Text:
    """Return a line that begins with a label."""
    return line(width, (label.ljust(LABEL), BOLD), *parts)


def spread(width: int, left: tuple[Part, ...], right: tuple[Part, ...], *, style: str = "") -> Text:
    """Return a line with parts at its left and right ends. The parts on the right are never cut."""
    end = line(width, *right)
    begin = line(width - end.cell_len - 1, *left)
    begin.append(" " * (width - begin.cell_len - end.cell_len))
    begin.append_text(end)
    begin.style = style
    return begin


def wrapped(width: int, words: str, *, first: str, most: int, style: str = "") -> list[Text]:
    """Return a sentence in at most `most` lines; lines after the first are indented by the width of `first`."""
    lines: list[Text] = []
    left = printable(words)
    space = max(8, width - len(first))
    while left and len(lines) < most:
        if len(left) <= space or len(lines) == most - 1:
            piece, left = left, ""
        else:
            cut = left.rfind(" ", 0, space + 1)
            piece, left = (left[:cut], left[cut + 1 :]) if cut > 0 else (left[:space], left[space:])
        lines.append(line(width, (first if not lines else " " * len(first), style), (piece, style)))
    return lines
