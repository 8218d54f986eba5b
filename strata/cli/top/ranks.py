"""The table of a job's ranks in `strata top`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.text import Text

from strata.cli.top.lines import BAD, BAR, DIM, WARN, line
from strata.cli.top.table import Column, Styled, fitted, heading, row
from strata.observe.words import age, figure

Resource = Mapping[str, Any]

WORST_HIGH: Final = frozenset({"SEEN", "COMPUTE", "STUCK"})
"""Columns that are sorted in descending order by default, so that conspicuous ranks are on top."""
QUIET_MS: Final = 30_000
SLOW, VERY_SLOW = 0.8, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The column that ranks are sorted by, and the direction."""

    by: str = "RANK"
    reverse: bool = False

    @property
    def down(self) -> bool:
        return (self.by in WORST_HIGH) != self.reverse


def sorts(ranks: Resource) -> list[str]:
    """Return the columns by which these ranks can be sorted."""
    return [column.name for column in _columns(ranks)]


def ordered(ranks: Resource, order: Order) -> list[int]:
    """Return the ranks in order; ranks without a value come last."""
    key = _values(ranks)[order.by]
    known = [rank for rank in range(ranks["size"]) if key(rank) is not None]
    unknown = [rank for rank in range(ranks["size"]) if key(rank) is None]
    known.sort(key=key, reverse=order.down)  # stable: equal values stay in the order of ranks
    return known + unknown


def table(
    ranks: Resource, order: Order, *, width: int, first: int, most: int | None, cursor: int | None
) -> list[Text]:
    """Return the heading and at most `most` ranks from position `first` on; the rank at `cursor` is highlighted."""
    columns = fitted(_columns(ranks), width)
    rows = ordered(ranks, order)[first:]
    return [
        heading(columns, width, sorted_by=order.by, down=order.down),
        *(
            row(columns, rank, width, style=BAR if at == cursor else "", fill=at == cursor)
            for at, rank in enumerate(rows[:most], first)
        ),
    ]


def summary(ranks: Resource, width: int) -> Text:
    """Return the number of ranks in each phase, as a line."""
    phases = ranks["phases"]
    counts = {phases[at]: ranks["phase"].count(at) for at in range(len(phases))}
    text = ", ".join(
        f"{count} in {phase}" if phase else f"{count} silent" for phase, count in counts.items() if count
    )
    return line(width, (text, DIM))


def _worker(ranks: Resource, rank: int) -> Resource | None:
    at = ranks["worker"][rank]
    return ranks["workers"][at] if at >= 0 else None


def _values(ranks: Resource) -> dict[str, Callable[[int], Any]]:
    """Return a function for each column; it returns a rank's value, or None if the value is not known."""

    def of_worker(field: str) -> Callable[[int], Any]:
        def value(rank: int) -> Any:
            worker = _worker(ranks, rank)
            return worker[field] or None if worker is not None else None

        return value

    def of(field: str) -> Callable[[int], Any]:
        values: Sequence[Any] = ranks[field]
        return values.__getitem__

    return {
        "RANK": lambda rank: rank,
        "WORKER": of_worker("worker_id"),
        "HOST": of_worker("host"),
        "STEP": of("step"),
        "PHASE": lambda rank: ranks["phases"][ranks["phase"][rank]] or None,
        "SEEN": of("last_seen_ms"),
        "COMPUTE": of("compute_us"),
        "PEERS": of("relative_score"),
        "SELF": of("own_score"),
        "STUCK": lambda rank: ranks["stalled_ms"][rank] or None,
    }


def _columns(ranks: Resource) -> list[Column]:
    values = _values(ranks)
    workers = ranks["workers"]
    wide_worker = max((len(each["worker_id"]) for each in workers), default=0)
    wide_host = max((len(each["host"]) for each in workers), default=0)
    wide_step = max((len(f"{step:,}") for step in ranks["step"] if step is not None), default=1)
    wide_phase = max(map(len, ranks["phases"]), default=0)
    hosts_tell = any(each["host"] not in ("", each["worker_id"]) for each in workers)

    def shown(name: str, style: Callable[[int, Any], str], words: Callable[[Any], str] = str) -> Any:
        def cell(rank: int) -> Styled:
            value = values[name](rank)
            return ("-", "") if value is None else (words(value), style(rank, value))

        return cell

    def lost(rank: int, _value: object) -> str:
        worker = _worker(ranks, rank)
        if worker is None or not (worker["lost"] or worker.get("done")):
            return ""
        return BAD if worker["lost"] else DIM

    def score(_rank: int, value: float) -> str:
        return BAD if value < VERY_SLOW else WARN if value < SLOW else ""

    def plain(_rank: int, _value: object) -> str:
        return ""

    found = [
        Column(name="RANK", width=max(5, len(str(ranks["size"]))), cell=shown("RANK", plain)),
        Column(
            name="WORKER",
            width=max(7, wide_worker),
            cell=shown("WORKER", lost),
            least=10 if wide_worker > 10 else 0,
            left=True,
        ),
    ]
    if hosts_tell:
        host = shown("HOST", lost)
        found.append(
            Column(
                name="HOST",
                width=max(5, wide_host),
                cell=host,
                least=min(8, max(5, wide_host)),
                left=True,
                goes=1,
            )
        )
    found += [
        Column(name="STEP", width=max(6, wide_step), cell=shown("STEP", plain, lambda v: f"{v:,}")),
        Column(
            name="PHASE",
            width=max(6, wide_phase),
            cell=shown("PHASE", plain),
            least=min(10, max(6, wide_phase)),
            left=True,
        ),
        Column(
            name="SEEN",
            width=6,
            cell=shown(
                "SEEN", lambda _r, v: WARN if v > QUIET_MS else "", lambda v: age(v) if v >= 1000 else "now"
            ),
        ),
        Column(name="COMPUTE", width=8, cell=shown("COMPUTE", plain, duration_us)),
    ]
    for name, field in (("PEERS", "relative_score"), ("SELF", "own_score")):
        if any(value is not None for value in ranks[field]):
            found.append(Column(name=name, width=6, cell=shown(name, score, lambda v: f"{v:.2f}")))
    found.append(Column(name="STUCK", width=7, cell=shown("STUCK", lambda _r, _v: BAD, age)))
    return found


def duration_us(value: float) -> str:
    """Return a short duration as text: `850 us`, `12.5 ms`, `1.2 s`."""
    if value < 1000:
        return f"{value:.0f} us"
    return f"{figure(value / 1e3)} ms" if value < 1e6 else f"{figure(value / 1e6)} s"
