"""The list of a cluster's jobs in `strata top`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.text import Text

from strata.cli.top.job_page import PHASES
from strata.cli.top.lines import BAD, BAR, BOLD, DIM, GOOD, WARN, Part, line, wrapped
from strata.cli.top.seen import Resource, Seen
from strata.cli.top.table import Column, Styled, fitted, heading, row
from strata.observe.bars import bar
from strata.observe.words import figure, percent, span

BAR_WIDTH = 8


def title(seen: Seen) -> tuple[Part, ...]:
    """Return the cluster's name, leader and health for the first line."""
    cluster = seen.cluster
    if cluster is None:
        return ((f"{seen.total} jobs", BOLD),)
    ready = sum(1 for replica in cluster["replicas"] if replica["ready"])
    count = len(cluster["replicas"])
    members, etcd = len(cluster["etcd"]), sum(1 for member in cluster["etcd"] if member["healthy"])
    return (
        (f"cluster {cluster['cluster']}", BOLD),
        f"  {seen.total} jobs  leader ",
        (cluster["leader"] or "none", "" if cluster["leader"] else BAD),
        "  ",
        (f"replicas {ready}/{count}", "" if ready == count else WARN),
        (f"  etcd {etcd}/{members}" if members else "", "" if etcd == members else WARN),
    )


def sections(seen: Seen, *, width: int, height: int | None) -> list[Text]:
    """Return the cluster's alarms, which need an operator's action."""
    alarms = seen.cluster["alarms"] if seen.cluster is not None else ()
    most = 3 if height is not None and height < 30 else 8
    return [each for alarm in alarms for each in wrapped(width, alarm, first="! ", most=2, style=BAD)][:most]


def table(seen: Seen, *, width: int, first: int, most: int | None, cursor: int | None) -> list[Text]:
    """Return the jobs from position `first` on; the job at position `cursor` is highlighted."""
    if not seen.jobs:
        return [line(width, ("no job yet: start one with strata run -- python train.py", DIM))]
    columns = fitted(_columns(seen.jobs), width)
    last = len(seen.jobs) if most is None else first + most
    return [
        heading(columns, width),
        *(
            row(columns, at, width, style=BAR if at == cursor else "", fill=at == cursor)
            for at in range(first, min(last, len(seen.jobs)))
        ),
    ]


def about(job: Resource, *, width: int, most: int) -> list[Text]:
    """Return the finding or reason of the job under the cursor, as sentences."""
    words = job["unreadable"] or job["finding"] or job["reason"]
    if not words:
        return []
    style = BAD if job["unreadable"] or job["finding"] or job["phase"] == "failed" else DIM
    return wrapped(
        width, f"{job['name']}: {words}", first="! " if style == BAD else "", most=most, style=style
    )


def _columns(jobs: tuple[Resource, ...]) -> list[Column]:
    def of(field: str) -> Callable[[int], Any]:
        return lambda at: jobs[at][field]

    def progress(field: str) -> Callable[[int], Any]:
        def value(at: int) -> Any:
            found = jobs[at]["progress"]
            return found[field] if found is not None else None

        return value

    def cell(
        value: Callable[[int], Any],
        words: Callable[[Any], str] = str,
        style: Callable[[int, Any], str] = lambda _at, _value: "",
    ) -> Callable[[int], Styled]:
        def styled(at: int) -> Styled:
            found = value(at)
            return ("-", "") if found is None else (words(found), style(at, found))

        return styled

    def name(at: int) -> Styled:
        job = jobs[at]
        bad = bool(job["finding"] or job["unreadable"])
        return (("! " if bad else "") + job["name"], BAD if bad else "")

    def step(at: int) -> Styled:
        low, target = progress("step")(at), progress("target_step")(at)
        if low is None:
            return "-", ""
        return (f"{low:,}/{target:,}" if target else f"{low:,}"), ""

    def done(at: int) -> Styled:
        low, target = progress("step")(at), progress("target_step")(at)
        if low is None or not target:
            return "-", ""
        return f"{''.join(bar(low / target, BAR_WIDTH))} {100 * low / target:3.0f} %", GOOD

    def wide(styled: Callable[[int], Styled], least: int) -> int:
        return max(least, *(len(styled(at)[0]) for at in range(len(jobs))))

    def good(value: float) -> str:
        return percent(value)

    phase = cell(of("phase"), style=lambda _at, value: PHASES.get(value, ""))
    members = [job["members"] - job["standbys"] for job in jobs]
    world = cell(lambda at: f"{jobs[at]['ranks']}/{members[at]}" if jobs[at]["ranks"] else None)
    saved = cell(of("checkpoint_step"), lambda value: f"{value:,}")
    rate = cell(progress("steps_per_s"), figure)
    goodput = cell(of("goodput_ratio"), good, lambda _at, v: WARN if v < 0.8 else "")
    waits = cell(lambda at: jobs[at]["open_barriers"] or None)
    eta = cell(progress("eta_ms"), span)
    found = [
        Column(name="JOB", width=wide(name, 8), cell=name, least=min(14, wide(name, 8)), left=True),
        Column(name="PHASE", width=wide(phase, 7), cell=phase, left=True),
        Column(name="STEP", width=wide(step, 6), cell=step),
    ]
    if any(progress("target_step")(at) for at in range(len(jobs))):
        found.append(Column(name="DONE", width=BAR_WIDTH + 6, cell=done, goes=2))
        found.append(Column(name="ETA", width=wide(eta, 5), cell=eta))
    return [
        *found,
        Column(name="STEPS/S", width=7, cell=rate),
        Column(name="GOODPUT", width=7, cell=goodput),
        Column(name="SAVED", width=wide(saved, 5), cell=saved, goes=1),
        Column(name="RANKS/ON", width=8, cell=world, goes=4),
        Column(name="BARRIERS", width=8, cell=waits, goes=5),
    ]
