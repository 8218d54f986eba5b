"""The frame of every page: head, header, footer, and the pieces that all of them use.

Style and script stand in the page and are named by their digests in its policy: nothing is loaded, and
nothing else runs.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Final

from strata.dashboard.html import Child, Markup, join, tag
from strata.dashboard.status import EventStatus
from strata.observe.words import age

_FILES: Final = resources.files("strata.dashboard")
STYLE: Final = _FILES.joinpath("style.css").read_text()
SCRIPT: Final = _FILES.joinpath("refresh.js").read_text()
ICON: Final = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cg fill='%230b5cad'%3E"
    "%3Crect x='1' y='2' width='14' height='3'/%3E%3Crect x='1' y='7' width='14' height='3' opacity='.7'/%3E"
    "%3Crect x='1' y='12' width='14' height='3' opacity='.4'/%3E%3C/g%3E%3C/svg%3E"
)
RELOAD_S: Final = 5
NONE: Final = "\N{EN DASH}"
"""What stands where there is nothing to say."""
LONG: Final = 160


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY: Final = (
    f"default-src 'none'; style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)}; img-src data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(title: str, header: Sequence[Child], main: Sequence[Child], footer: Sequence[Child]) -> str:
    """Return a whole document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("link", rel="icon", href=ICON),
        tag("noscript", tag("meta", http_equiv="refresh", content=RELOAD_S)),
        Markup(f"<style>{STYLE}</style>"),
    )
    lost = tag(
        "p", "This replica does not answer. What is shown is the last it said.", id="lost", class_="note bad"
    )
    body = tag(
        "body",
        tag("header", *header),
        lost,
        tag("main", *main),
        tag("footer", *footer),
        Markup(f"<script>{SCRIPT}</script>"),
    )
    return "<!doctype html>" + str(tag("html", head, body, lang="en"))


class Column:
    """A column's heading; numbers are set flush right, `wide` ones are left out on a phone."""

    def __init__(self, name: str, *, number: bool = False, wide: bool = False, class_: str = "") -> None:
        self.name = name
        self.classes = " ".join(filter(None, ("n" if number else "", "wide" if wide else "", class_))) or None


def table(columns: Sequence[Column], rows: Iterable[Sequence[Child]]) -> Markup:
    """Return a table that scrolls sideways where it is too wide."""
    head = tag("tr", *(tag("th", column.name, class_=column.classes, scope="col") for column in columns))
    body = [
        tag(
            "tr", *(tag("td", cell, class_=column.classes) for column, cell in zip(columns, row, strict=True))
        )
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")


def section(title: str, *children: Child, aside: str = "") -> Markup:
    return tag("section", tag("h2", title, tag("small", f"  {aside}") if aside else None), *children)


def facts(*pairs: tuple[str, Child]) -> Markup:
    """Return a few figures with their names."""
    return tag(
        "dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="facts"
    )


def mark(kind: str, text: Child) -> Markup:
    """Return a text with its sign: good, warn, bad or idle."""
    return tag("span", text, class_=kind)


def empty(*children: Child) -> Markup:
    return tag("p", *children, class_="empty")


def note(*children: Child, bad: bool = False) -> Markup:
    return tag("p", *children, class_="note bad" if bad else "note")


def span(low: int | None, high: int | None) -> str:
    """Return where the ranks are: one step, or the slowest and the fastest."""
    if low is None or high is None:
        return NONE
    return str(low) if low == high else f"{low} {NONE} {high}"


def ago(milliseconds: int | None) -> str:
    return NONE if milliseconds is None else f"{age(milliseconds)} ago"


def short(text: str) -> str:
    """Return a text of bounded length."""
    return text if len(text) <= LONG else f"{text[: LONG - 1]}…"


def at(unix_ms: int) -> Markup:
    """Return a moment, in UTC."""
    moment = datetime.fromtimestamp(unix_ms / 1000, UTC)
    return tag("time", moment.strftime("%Y-%m-%d %H:%M:%S"), datetime=moment.isoformat(timespec="seconds"))


def bar(part: int, whole: int) -> Markup:
    """Return how much of the whole is there, to the eye and in numbers."""
    drawn = tag("progress", value=part, max=max(whole, 1), aria_hidden="true")
    return join((drawn, f" {part} of {whole}"))


def event_table(events: Sequence[EventStatus], *, with_job: bool) -> Markup:
    """Return what happened, newest first."""
    columns = [Column("at (UTC)"), Column("what")]
    if with_job:
        columns.append(Column("job"))
    columns.append(Column("", class_="why"))
    return table(
        columns,
        (
            (
                at(event.unix_ms),
                event.kind,
                *((tag("a", event.job, href=f"/jobs/{event.job}") if event.job else "",) if with_job else ()),
                short(event.text),
            )
            for event in events
        ),
    )
