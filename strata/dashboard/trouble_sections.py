"""What is wrong with a job, drawn: four sections of its page, each absent while there is nothing to show."""

from __future__ import annotations

from collections.abc import Iterator

from strata.dashboard.html import Child, Markup, join, tag
from strata.dashboard.layout import NONE, Column, mark, note, section, short, table
from strata.dashboard.troubles import DeviceStatus, HeldStatus, SlowStatus, StallStatus, TroubleStatus
from strata.observe.words import age, size


def trouble_notes(trouble: TroubleStatus) -> Iterator[Markup]:
    """Yield the sentence that says what is wrong, if anything is."""
    if trouble.says:
        yield note(trouble.says, bad=True)


def trouble_sections(trouble: TroubleStatus) -> Iterator[Markup]:
    """Yield what there is to show of stalls, held saves, slow ranks and devices."""
    if trouble.stalled:
        shown = len(trouble.stalled)
        aside = f"the first {shown} of {trouble.stalled_count}" if shown < trouble.stalled_count else ""
        how = tag("p", trouble.how, class_="soft") if trouble.how else None
        yield section("Ranks that stand still", how, join(map(_stall, trouble.stalled)), aside=aside)
    if trouble.held:
        shown = len(trouble.held)
        aside = f"the first {shown} of {trouble.held_count}" if shown < trouble.held_count else ""
        yield section("Saves that are held", _held(trouble.held), aside=aside)
    if trouble.slow:
        yield section("Slow ranks", _slow(trouble.slow))
    if trouble.devices:
        shown = len(trouble.devices)
        aside = f"the first {shown} of {trouble.device_count}" if shown < trouble.device_count else ""
        yield section("Devices", _devices(trouble.devices), aside=aside)


def _stall(stall: StallStatus) -> Markup:
    trace: Child = None
    if stall.trace_file:
        trace = tag(
            "p",
            "Its communication was recorded on its host: ",
            tag("code", stall.trace_file),
            f" ({size(stall.trace_bytes)})",
            class_="soft",
        )
    return tag(
        "div",
        tag(
            "p",
            mark("bad" if stall.suspect else "warn", tag("strong", f"rank {stall.rank}")),
            f"  of {stall.worker_id}, at step {stall.step}, {short(stall.phase) or 'no phase told'},"
            f" for {age(stall.stalled_ms)}",
            tag("span", "  held up by others", class_="soft") if not stall.suspect else None,
        ),
        _stack(stall.stack)
        if stall.stack
        else tag("p", "No stack: it does not use the library.", class_="soft"),
        trace,
    )


def _stack(stack: str) -> Markup:
    """Return the lines of a stack, each escaped by itself: a line break is the only control it may have."""
    lines = (join((line, Markup("\n"))) for line in stack.splitlines())
    return tag("pre", *lines)


def _held(held: tuple[HeldStatus, ...]) -> Markup:
    return table(
        (
            Column("rank", number=True),
            Column("member"),
            Column("host"),
            Column("step", number=True),
            Column("held for", number=True),
            Column("", class_="why"),
        ),
        (
            (
                each.rank,
                each.worker_id,
                short(each.host) or NONE,
                each.step,
                age(each.held_s * 1000),
                mark("bad", short(each.reason) or "the storage refuses"),
            )
            for each in held
        ),
    )


def _slow(slow: tuple[SlowStatus, ...]) -> Markup:
    return table(
        (
            Column("rank", number=True),
            Column("member"),
            Column("last step", number=True),
            Column("usual step", number=True),
            Column("", class_="why"),
        ),
        (
            (each.rank, each.worker_id, age(each.step_s * 1000), age(each.median_step_s * 1000), each.why)
            for each in slow
        ),
    )


def _devices(devices: tuple[DeviceStatus, ...]) -> Markup:
    return table(
        (
            Column("member"),
            Column("device", number=True),
            Column("busy", number=True),
            Column("memory", number=True),
            Column("temperature", number=True),
            Column("power", number=True, wide=True),
            Column("ECC", number=True, wide=True),
            Column("XIDs", wide=True),
            Column("health", class_="why"),
        ),
        (
            (
                each.worker_id,
                each.index,
                _given(each.utilization_percent, " %"),
                _memory(each),
                _given(each.temperature_c, " °C"),
                NONE if each.power_mw is None else f"{each.power_mw / 1000:.0f} W",
                _given(each.ecc_uncorrected, ""),
                ", ".join(map(str, each.xids[-5:])) or NONE,
                mark("bad", short(each.fault)) if each.fault else mark("good", short(each.name) or "healthy"),
            )
            for each in devices
        ),
    )


def _given(value: int | None, unit: str) -> str:
    return NONE if value is None else f"{value}{unit}"


def _memory(device: DeviceStatus) -> str:
    if device.memory_used_bytes is None or device.memory_total_bytes is None:
        return NONE
    return f"{size(device.memory_used_bytes)} of {size(device.memory_total_bytes)}"
