"""The content of the screen, and the effect of keys on it, as pure functions; `terminal` does the I/O."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from rich.text import Text

from strata.cli.top import job_page, jobs_page, rank_page
from strata.cli.top.lines import BAD, BAR, BOLD, DIM, Part, line, spread
from strata.cli.top.ranks import Order, ordered, sorts
from strata.cli.top.seen import Seen
from strata.observe.words import age

STALE_S: Final = 3.0
HELP: Final = (
    ("j k  arrows", "down and up"),
    ("space b  PgDn PgUp", "a page down and up"),
    ("g G  Home End", "to the first and the last"),
    ("Enter", "open the job, or the rank, under the cursor"),
    ("Esc  Backspace", "back to the job, and to the list of jobs"),
    ("s  > <", "sort ranks by the next column, or the one before"),
    ("r", "sort them the other way round"),
    ("?", "show or hide this help"),
    ("q  Ctrl-C", "quit"),
    ("", ""),
    ("PEERS", "the fastest rank's compute time over this one's: 1 is as fast"),
    ("SELF", "its own best over its present one: 1 is as fast as ever"),
    ("STUCK", "for how long it has made no step and changed no phase"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The displayed page (the list, one job or one rank), the position in it, and the order of ranks."""

    job: str | None = None
    cursor: int = 0
    """The cursor's row in the list of jobs."""
    on: int | None = None
    """The rank that the cursor follows; None: the cursor stays in the first row."""
    rank: int | None = None
    """The rank whose page is open."""
    scroll: int = 0
    """The first visible line of that rank's page."""
    order: Order = field(default_factory=Order)
    help: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    width: int
    height: int


def after_key(view: View, key: str, seen: Seen, rows: int) -> View | None:
    """Return the view after a key; None to quit. `rows` is the number of visible rows."""
    if key in ("q", "Q"):
        return None
    if view.help:
        return replace(view, help=False)
    match key:
        case "?" | "h":
            return replace(view, help=True)
        case "enter" if view.job is None and seen.jobs:
            at = min(view.cursor, len(seen.jobs) - 1)
            return replace(view, job=seen.jobs[at]["name"], cursor=at, on=None)
        case "esc" | "backspace" if view.rank is not None:
            return replace(view, rank=None)
        case "esc" | "backspace" if view.job is not None:
            return replace(view, job=None, on=None)
        case "enter" if view.job is not None and view.rank is None and _size(seen):
            assert seen.ranks is not None
            rank = ordered(seen.ranks, view.order)[_place(view, seen)]
            return replace(view, rank=rank, on=rank, scroll=0)
        case "s" | ">" if view.job is not None and view.rank is None:
            return replace(view, order=_beside(view.order, 1, seen), on=None)
        case "<" if view.job is not None and view.rank is None:
            return replace(view, order=_beside(view.order, -1, seen), on=None)
        case "r" if view.job is not None and view.rank is None:
            return replace(view, order=replace(view.order, reverse=not view.order.reverse), on=None)
        case _:
            return _moved(view, key, seen, rows)


def _beside(order: Order, by: int, seen: Seen) -> Order:
    names = sorts(seen.ranks) if seen.ranks is not None else [order.by]
    at = names.index(order.by) if order.by in names else 0
    return Order(by=names[(at + by) % len(names)])


def _moved(view: View, key: str, seen: Seen, rows: int) -> View:
    far = 1_000_000_000
    steps = {
        "j": 1,
        "down": 1,
        "k": -1,
        "up": -1,
        " ": rows,
        "pgdn": rows,
        "b": -rows,
        "pgup": -rows,
        "g": -far,
        "home": -far,
        "G": far,
        "end": far,
    }
    by = steps.get(key, 0)
    if view.job is None:
        return replace(view, cursor=_within(view.cursor + by, len(seen.jobs) - 1))
    if view.rank is not None:
        return replace(view, scroll=max(0, view.scroll + by))
    if seen.ranks is None or by == 0:
        return view
    place = _within(_place(view, seen) + by, _size(seen) - 1)
    # In the first row the cursor follows no rank, because conspicuous ranks move to the first row.
    return replace(view, on=ordered(seen.ranks, view.order)[place] if place else None)


def _place(view: View, seen: Seen) -> int:
    """Return the cursor's row in the table."""
    if view.on is None or not _size(seen):
        return 0
    assert seen.ranks is not None
    return ordered(seen.ranks, view.order).index(min(view.on, _size(seen) - 1))


def _size(seen: Seen) -> int:
    return int(seen.ranks["size"]) if seen.ranks is not None else 0


def _within(value: int, most: int) -> int:
    return max(0, min(value, most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A screen with exactly as many lines as its height; `rows` is the number of visible rows of the table."""

    lines: list[Text]
    rows: int
    view: View
    """The view that is shown, with the scroll position limited to the existing lines."""


def frame(view: View, seen: Seen, size: Size, *, now_s: float, now_ms: int) -> Frame:
    """Return the screen. `now_s` is the time on the reader's clock, `now_ms` since 1970."""
    width, height = size.width, size.height
    fresh = seen.job == view.job
    shown = seen if fresh else Seen(at_s=seen.at_s, job=view.job)
    about = replace(shown, rank=view.rank)
    head = [_first_line(about, width, now_s=now_s, fresh=fresh)]
    body_height = max(0, height - 2)
    rows = 0
    if view.help:
        body = [line(width, (f"{keys:<20}", BOLD), words) for keys, words in HELP]
    elif not fresh:
        body = [line(width, ("reading …", DIM))]
    elif view.job is None:
        body, rows = _list(view, shown, width, body_height)
    elif view.rank is not None:
        body, view = _rank(view, shown, width, body_height)
        rows = body_height
    else:
        body, rows = _job(view, shown, width, body_height, now_ms)
    body = body[:body_height]
    blank = [Text("")] * (body_height - len(body))
    return Frame(
        lines=[*head, *body, *blank, _last_line(view, shown, width, rows)][:height],
        rows=max(1, rows),
        view=view,
    )


def snapshot(seen: Seen, width: int, *, now_ms: int) -> list[Text]:
    """Return the whole content, not limited to the terminal's height."""
    if seen.job is None:
        return [
            line(width, *jobs_page.title(seen)),
            *jobs_page.sections(seen, width=width, height=None),
            *jobs_page.table(seen, width=width, first=0, most=None, cursor=None),
            *(
                each
                for job in seen.jobs
                if job["finding"]
                for each in jobs_page.about(job, width=width, most=3)
            ),
        ]
    return [
        line(width, *job_page.title(seen)),
        *job_page.sections(seen, width=width, height=None, now_ms=now_ms),
        *job_page.table(seen, Order(), width=width, first=0, most=None, cursor=None),
    ]


def _list(view: View, seen: Seen, width: int, height: int) -> tuple[list[Text], int]:
    above = jobs_page.sections(seen, width=width, height=height)
    at = _within(view.cursor, len(seen.jobs) - 1)
    details = jobs_page.about(seen.jobs[at], width=width, most=2) if seen.jobs else []
    rows = max(1, height - len(above) - 1 - 2)
    first = at // rows * rows
    table = jobs_page.table(seen, width=width, first=first, most=rows, cursor=at)
    gap = [Text("")] * max(0, height - len(above) - len(table) - len(details))
    return [*above, *table, *gap, *details], rows


def _job(view: View, seen: Seen, width: int, height: int, now_ms: int) -> tuple[list[Text], int]:
    above = job_page.sections(seen, width=width, height=height, now_ms=now_ms)
    rows = max(1, height - len(above) - 1)
    at = _place(view, seen)
    first = _within(at // rows * rows, _size(seen) - rows)
    return [*above, *job_page.table(seen, view.order, width=width, first=first, most=rows, cursor=at)], rows


def _rank(view: View, seen: Seen, width: int, height: int) -> tuple[list[Text], View]:
    """Return the lines of a rank's page, and the first visible line, limited so that the last lines fill the screen."""
    if seen.rank != view.rank or seen.one is None:
        return [line(width, ("reading …", DIM))], replace(view, scroll=0)
    lines = rank_page.lines(seen.one, width)
    scroll = _within(view.scroll, len(lines) - height)
    return lines[scroll:], replace(view, scroll=scroll)


def _first_line(seen: Seen, width: int, *, now_s: float, fresh: bool) -> Text:
    title = (
        jobs_page.title(seen)
        if seen.job is None
        else job_page.title(seen)
        if seen.rank is None
        else rank_page.title(seen)
    )
    old_s = now_s - seen.at_s
    if seen.error or old_s > STALE_S:
        text = f"{age(1000 * old_s)} old" if fresh and seen.read else "no data"
        return spread(width, title, ((f" {text} ", f"{BAD} reverse"),))
    by = seen.cluster["answered_by"] if seen.cluster is not None else ""
    if not by:
        return line(width, *title)
    whole = line(width, *title)
    return whole if whole.cell_len + len(by) + 6 > width else spread(width, title, ((f"via {by}", DIM),))


def _last_line(view: View, seen: Seen, width: int, rows: int) -> Text:
    if seen.error:
        return spread(width, ((seen.error, ""),), (("q quit", ""),), style=BAR)
    if view.help:
        return spread(width, ("any key: back",), ("q quit",), style=BAR)
    if view.job is None:
        where: Part = _where(view.cursor // max(1, rows) * max(1, rows), rows, len(seen.jobs), seen.total)
        return spread(width, ("Enter open  j/k move  ? help  q quit",), (where,), style=BAR)
    if view.rank is not None:
        return spread(width, ("Esc ranks  j/k scroll  ? help  q quit",), ("",), style=BAR)
    size = _size(seen)
    order = f"{view.order.by} {'▼' if view.order.down else '▲'}"
    keys = f"Enter open  Esc jobs  s sort: {order}  r reverse  ? help  q quit"
    first = _within(_place(view, seen) // max(1, rows) * rows, size - rows)
    return spread(width, (keys,), (_where(first, rows, size, size),), style=BAR)


def _where(first: int, rows: int, count: int, total: int) -> str:
    if not count:
        return ""
    return f"{first + 1}-{min(count, first + rows)} of {total:,}"
