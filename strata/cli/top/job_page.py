"""The page of one job in `strata top`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.text import Text

from strata.cli.top import ranks as rank_table
from strata.cli.top.lines import BAD, BOLD, DIM, GOOD, LABEL, WARN, Part, labelled, line, wrapped
from strata.cli.top.ranks import Order
from strata.cli.top.seen import Resource, Seen
from strata.observe.bars import bar, shares, sparkline
from strata.observe.words import age, counted, figure, percent, size, span

PHASES: Final = {"running": GOOD, "failed": BAD, "stopping": WARN, "paused": WARN, "waiting": WARN}
MIN_RANKS: Final = 5
"""How many lines of the table of ranks remain visible, if the terminal has that many lines."""
FILLS: Final = "█▓▒░▚·"
COLOURS: Final = ("green", "cyan", "yellow", "magenta", "blue", "red")


def sections(seen: Seen, *, width: int, height: int | None, now_ms: int) -> list[Text]:
    """Return the sections above the table of ranks, cut so that the table has `MIN_RANKS` lines."""
    if seen.detail is None:
        return []
    most = height - MIN_RANKS - 1 if height is not None else 10_000
    groups = [
        _findings(seen.detail, width, most=3 if most < 16 else 8),
        _not_shown(seen, width),
        _progress(seen, width, most),
        _goodput(seen.detail, width, rows=most >= 22),
        _barriers(seen.barriers, width, most=1 if most < 16 else 5),
        _saves(seen.checkpoints, width, most=1 if most < 22 else 4, now_ms=now_ms),
        _generations(seen.generations, width, most=1 if most < 22 else 5, now_ms=now_ms),
    ]
    lines = [each for group in groups for each in group]
    return lines[: max(0, most)]


def title(seen: Seen) -> tuple[Part, ...]:
    """Return the job's name, phase and size for the first line."""
    if seen.detail is None:
        return ((seen.job or "", BOLD),)
    job = seen.detail["summary"]
    members = counted(job["members"], job["standbys"])
    return (
        (job["name"], BOLD),
        "  ",
        (job["phase"], PHASES.get(job["phase"], "")),
        f"  generation {job['generation']}  {job['ranks']} ranks  {members}",
    )


def table(
    seen: Seen, order: Order, *, width: int, first: int, most: int | None, cursor: int | None
) -> list[Text]:
    """Return the table of ranks from position `first` on; the rank at position `cursor` is highlighted."""
    if "ranks" in seen.not_shown:
        return [line(width, ("the ranks are not shown: see above", DIM))]
    if seen.ranks is None or not seen.ranks["size"]:
        return [line(width, ("no rank: the job has no generation that runs", DIM))]
    return rank_table.table(seen.ranks, order, width=width, first=first, most=most, cursor=cursor)


def _findings(job: Resource, width: int, *, most: int) -> list[Text]:
    """Return the job's findings as sentences, and the reason if the job is not running."""
    lines: list[Text] = []
    found = job["findings"]
    for number, finding in enumerate(found):
        style = WARN if finding["kind"] in ("slow", "held") else BAD
        lines += wrapped(width, finding["text"], first="! ", most=2, style=style)
        left = len(found) - number - 1
        if left and len(lines) >= most:
            lines[most - 1 :] = [line(width, (f"! and {left + 1} more: strata jobs show", BAD))]
            break
    summary, notice = job["summary"], job["notice"]
    if summary["unreadable"]:
        lines += wrapped(width, summary["unreadable"], first="! ", most=2, style=BAD)
    if notice is not None:
        who = f" of {', '.join(notice['workers'])}" if notice["workers"] else ""
        text = f"{notice['action']}{who}: {notice['reason']}; {notice['stopped']} of {notice['ranks']} ranks have stopped"
        lines.append(labelled(width, "request", (text, WARN)))
    if summary["phase"] != "running" and summary["reason"] and notice is None:
        lines += wrapped(width, summary["reason"], first="why".ljust(LABEL), most=2, style=WARN)
    if job["failed_in_a_row"]:
        text = f"{job['failed_in_a_row']} of at most {job['max_failed_in_a_row']} generations in a row without a checkpoint"
        lines.append(labelled(width, "failed", (text, BAD)))
    return lines


def _not_shown(seen: Seen, width: int) -> list[Text]:
    """Return the names of the parts that are too large for an answer; the dashboard shows those parts."""
    lines: list[Text] = []
    for name, why in seen.not_shown.items():
        text = f"{name}: {why}; see the dashboard"
        lines += wrapped(width, text, first="not shown ", most=2, style=WARN)
    return lines


# -- progress


def _progress(seen: Seen, width: int, most: int) -> list[Text]:
    assert seen.detail is not None
    found = seen.detail["summary"]["progress"]
    series = seen.history["series"] if seen.history is not None else {}
    if found is None or found["step"] is None:
        lines = [labelled(width, "step", ("nothing was reported yet", DIM))]
    else:
        lines = [labelled(width, "step", *_how_far(found, width))]
        lines += _rates(found, series, width)
    lines += _reported(seen.detail["reported"], series, width, rows=most >= 17)
    return lines


def _how_far(found: Resource, width: int) -> Iterator[Part]:
    step, target = found["step"], found["target_step"]
    behind = found["step_high"] - step if found["step_high"] is not None else 0
    spread_words = f" (+{behind} ahead)" if behind > 1 and width >= 100 else ""
    epoch = f"  epoch {found['epoch']}" if found["epoch"] else ""
    if not target:
        yield f"{step:,}{spread_words}{epoch}"
        return
    end = f"ETA {span(found['eta_ms'])}" if found["eta_ms"] is not None else "ETA -"
    words = f"{step:,} of {target:,}{spread_words}{epoch}"
    after = f" {percent(step / target):>7}  {end}"
    space = width - LABEL - len(words) - len(after) - 1
    yield words + " "
    if space >= 8:
        done, to_do = bar(step / target, min(space, 60))
        yield (done, GOOD)
        yield (to_do, DIM)
    yield after


def _rates(found: Resource, series: Resource, width: int) -> list[Text]:
    if found["steps_per_s"] is None:
        return []
    words = f"{figure(found['steps_per_s'])} steps/s"
    if found["samples_per_s"]:
        words += f"  {figure(found['samples_per_s'])} samples/s"
    since = found["since_step_ms"]
    slow = since is not None and since > max(5000.0, 5000.0 / max(found["steps_per_s"], 1e-9))
    last = f"  last step {age(since)} ago" if since is not None else ""
    spark = _spark(series, "steps_per_s", width - LABEL - len(words) - len(last) - 1)
    return [labelled(width, "rate", words + " ", (spark, "cyan"), (last, WARN if slow else DIM))]


def _spark(series: Resource, name: str, space: int) -> str:
    if name not in series or space < 6:
        return ""
    return sparkline(series[name]["values"], min(40, space))


def _reported(values: Mapping[str, Any], series: Resource, width: int, *, rows: bool) -> list[Text]:
    """Return the values that the program reports, loss first; with `rows`, a line with a sparkline for each value."""
    names = sorted(values, key=lambda name: ("loss" not in name, name))
    if not names:
        return []
    if not rows:
        parts: list[Part] = []
        for at, name in enumerate(names):
            spark = _spark(series, f"reported.{name}", 16) if at == 0 else ""
            parts += [(f"{name} ", DIM), _value(values[name]), f" {spark}  " if spark else "  "]
        return [labelled(width, "reported", *parts)]
    lines = []
    for at, name in enumerate(names[:4]):
        spark = _spark(series, f"reported.{name}", width - LABEL - 30)
        lines.append(
            labelled(
                width,
                "reported" if at == 0 else "",
                f"{name[:16]:<16} {_value(values[name]):>10}  ",
                (spark, "cyan"),
            )
        )
    if len(names) > 4:
        rest = "  ".join(f"{name} {_value(values[name])}" for name in names[4:])
        lines.append(labelled(width, "", (rest, DIM)))
    return lines


def _value(value: float | None) -> str:
    return "not a number" if value is None else figure(value)


# -- goodput


def _goodput(job: Resource, width: int, *, rows: bool) -> list[Text]:
    """Return the goodput account: a bar of all causes and their shares, which sum to 100 %."""
    found = job["goodput"]
    if found is None or not found["parts"]:
        return []
    causes = [(part["cause"], part["seconds"]) for part in found["parts"]]
    parts, shown = _ledger(causes, None if rows else width - LABEL)
    seconds = [spent for _, spent in parts]
    head = f"{shown[0]} % of {span(1000 * found['wall_s'])} "
    cells = shares(seconds, max(8, min(60, width - LABEL - len(head))))
    ledger = [(FILLS[at] * count, COLOURS[at]) for at, count in enumerate(cells)]
    lines = [labelled(width, "goodput", head, *ledger)]
    if not rows:
        legend: list[Part] = []
        for at, (cause, _) in enumerate(parts):
            legend += [(f"{FILLS[at]} ", COLOURS[at]), f"{cause} {shown[at]}  "]
        return [*lines, labelled(width, "", *legend)]
    for at, (cause, spent) in enumerate(parts):
        done, to_do = bar(spent / math.fsum(seconds), max(8, min(40, width - LABEL - 38)))
        name: Part = (f"{FILLS[at]} ", COLOURS[at])
        after: Part = (f"  {span(1000 * spent)}", DIM)
        share = f"{cause:<16} {shown[at]:>5} %  "
        lines.append(labelled(width, "", name, share, (done, COLOURS[at]), (to_do, DIM), after))
    return lines


def _ledger(causes: list[tuple[str, float]], width: int | None) -> tuple[list[tuple[str, float]], list[str]]:
    """Return the causes, the useful one first, and their shares of 100.0.

    If there are more causes than colours, or more than fit into a line of `width` (if given), the last entry is the
    sum of the remaining causes.
    """
    most = len(FILLS)
    while True:
        parts = causes
        if len(causes) > most:
            rest = math.fsum(spent for _, spent in causes[most - 1 :])
            parts = [*causes[: most - 1], (f"{len(causes) - most + 1} others", rest)]
        shown = [f"{tenths / 10:.1f}" for tenths in shares([spent for _, spent in parts], 1000)]
        wide = sum(len(f"x {cause} {share}  ") for (cause, _), share in zip(parts, shown, strict=True)) - 2
        if width is None or wide <= width or most == 1:
            return parts, shown
        most = min(most, len(parts)) - 1


# -- barriers, saves, generations


def _barriers(found: Resource | None, width: int, *, most: int) -> list[Text]:
    opened: Sequence[Resource] = found["open"] if found is not None else ()
    lines = []
    for at, each in enumerate(opened[:most]):
        who = ", ".join(sorted({one["worker_id"] for one in each["missing"] if one["worker_id"]}))
        on = f" ({who})" if who else ""
        more = f"  and {len(opened) - most} more" if at == most - 1 and len(opened) > most else ""
        missing: Part = (f"missing {each['missing_ranks']}{on}", WARN if each["age_ms"] > 5000 else "")
        text = f"{each['name']}  {each['arrived']} of {each['expected']}, {age(each['age_ms'])}  "
        lines.append(labelled(width, "barrier" if at == 0 else "", text, missing, (more, DIM)))
    return lines


def _saves(found: Resource | None, width: int, *, most: int, now_ms: int) -> list[Text]:
    """Return the latest checkpoint, the open saves, and the newest other checkpoints, up to `most` lines."""
    every: Sequence[Resource] = found["checkpoints"] if found is not None else ()
    if not every:
        return [labelled(width, "saved", ("nothing yet", DIM))]
    opened = [each for each in every if each["state"] in ("open", "prepared")]
    latest = [each for each in every if each["latest"]]
    rest = [each for each in every if each not in opened and each not in latest]
    lines = []
    for at, each in enumerate([*latest, *opened, *rest][: most + bool(opened)]):
        lines.append(labelled(width, "saved" if at == 0 else "", *_save(each, now_ms)))
    return lines


def _save(each: Resource, now_ms: int) -> Iterator[Part]:
    when = f"{age(max(0, now_ms - each['created_unix_ms']))} ago"
    if each["state"] in ("open", "prepared"):
        yield f"step {each['step']:,}  "
        missing = f", missing {each['missing_ranks']}" if each["missing_ranks"] else ""
        yield (f"being saved: {each['acked']} of {each['ranks']} ranks{missing}, begun {when}", WARN)
        return
    yield f"step {each['step']:,}"
    if each["state"] != "committed":
        yield (f"  {each['state']}", BAD if each["state"] in ("corrupt", "failed", "aborted") else DIM)
    yield f"  {size(each['size_bytes'])}  {when}"
    if each["latest"]:
        yield ("  latest", GOOD)
    if each["pinned"] or each["tags"]:
        yield (f"  {' '.join(['pinned'] * each['pinned'] + list(each['tags']))}", "cyan")
    if each["suspected"]:
        yield (f"  damaged on {', '.join(each['suspected'])}", BAD)


def _generations(found: Resource | None, width: int, *, most: int, now_ms: int) -> list[Text]:
    every: Sequence[Resource] = found["generations"] if found is not None else ()
    lines = []
    for at, each in enumerate(every[:most]):
        when = f"{age(max(0, now_ms - each['began_unix_ms']))} ago"
        restored = f" from step {each['restored_step']:,}" if each["restored_step"] is not None else ""
        text = f"{each['generation']}, {when}{restored}: "
        why: Part = (each["reason"], WARN if each["failure"] else "")
        lines.append(labelled(width, "began" if at == 0 else "", text, why))
    return lines
