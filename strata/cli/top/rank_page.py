"""The page of one rank in `strata top`: step, stack, devices, last output."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from strata.cli.top.lines import BAD, BOLD, DIM, WARN, Part, labelled, line, wrapped
from strata.cli.top.ranks import duration_us
from strata.cli.top.seen import Resource, Seen
from strata.observe.words import age


def title(seen: Seen) -> tuple[Part, ...]:
    """Return the job and the rank for the first line."""
    return ((seen.job or "", BOLD), "  ", (f"rank {seen.rank}", BOLD))


def lines(rank: Resource, width: int) -> list[Text]:
    """Return everything known about a rank."""
    stuck, report_age_ms = rank["stalled_ms"], rank["last_seen_ms"]
    step = f"{rank['step']:,}" if rank["step"] is not None else "-"
    report = (
        f"  {rank['phase'] or '-'}, reported {age(report_age_ms)} ago"
        if report_age_ms is not None
        else "  silent"
    )
    return [
        *(
            wrapped(width, rank["finding"], first="! ", most=4, style=BAD if stuck else WARN)
            if rank["finding"]
            else ()
        ),
        labelled(width, "on", rank["worker_id"], f"  {rank['host']}" if rank["host"] else ""),
        labelled(width, "step", step, report, (f"  stuck for {age(stuck)}", BAD) if stuck else ""),
        labelled(width, "compute", _compute(rank)),
        *(labelled(width, "device", *_device(each)) for each in rank["devices"]),
        *_part(width, "stack", "", rank["stack"].splitlines(), nothing="none: only a stuck rank has one"),
        *([labelled(width, "trace", rank["trace_file"])] if rank["trace_file"] else ()),
        *_written(rank, width),
    ]


def _compute(rank: Resource) -> str:
    if rank["compute_us"] is None:
        return "-"
    words = duration_us(rank["compute_us"])
    if rank["median_compute_us"] is not None:
        words += f", median {duration_us(rank['median_compute_us'])}"
    for field, than in (("relative_score", "to the fastest"), ("own_score", "to its own best")):
        if rank[field] is not None:
            words += f"  {rank[field]:.2f} {than}"
    return words


def _device(each: Resource) -> tuple[Part, ...]:
    busy = f"  {each['utilization_percent']} % busy" if each["utilization_percent"] is not None else ""
    return (f"{each['index']} {each['name']}{busy}", (f"  {each['fault']}" if each["fault"] else "", BAD))


def _written(rank: Resource, width: int) -> list[Text]:
    """Return the last output of the rank's process, and of the process before it."""
    if rank["log_file"] is None:
        return _part(width, "wrote", "", (), nothing="not known (yet): its agent has not answered")
    if not rank["log_file"]:
        return _part(width, "wrote", "", (), nothing="its agent keeps no output: strata run --log-dir")
    found = _part(width, "wrote", _process(rank["log_generation"], rank["log_ended"]), rank["log"])
    before = rank["log_before"]
    if before is not None:
        note = _process(before["generation"], before["ended"])
        found += _part(width, "before", note, before["lines"])
    return found


def _process(generation: int | None, ended: str) -> str:
    began = f"began in generation {generation}" if generation is not None else ""
    return f"{began}, {ended}" if began and ended else began or ended


def _part(width: int, name: str, note: str, words: Sequence[str], *, nothing: str = "nothing") -> list[Text]:
    head = labelled(width, name, (note or ("" if words else nothing), DIM))
    return [head, *(line(width, f"  {each}") for each in words)]
