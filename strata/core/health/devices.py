"""Device health: rules on a driver's readings that decide when an accelerator must not be used for training.

A rule compares a device's reading with the first reading of that device: a driver's counters outlive processes, so
only their growth since then counts. Every fault has the same consequence: the member is drained, because a device
that corrupts memory or has left the bus would make every later generation fail.

An XID is an error code of NVIDIA's driver. The list has the XIDs after which NVIDIA's catalog requires a GPU reset
or a host restart. Other XIDs drain no member and are only shown: those of an application (13, 31, 43, 45), of
contained or remapped memory (63, 92, 94), and unknown ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

FATAL_XIDS: Final[Mapping[int, str]] = {
    46: "the GPU stopped processing",
    48: "an uncorrectable double bit ECC error",
    62: "the internal micro-controller halted",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    95: "an uncontained memory error",
    109: "a context switch timed out",
    110: "a security fault",
    119: "the GPU's system processor did not answer",
    120: "the GPU's system processor failed",
    140: "an unrecovered ECC error",
    143: "the GPU could not be initialised",
}
THROTTLE_REASONS: Final[Mapping[int, str]] = {
    0x08: "hardware slowdown",
    0x20: "hot: software thermal slowdown",
    0x40: "hot: hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of NVML's clocks event reasons. Idle, an application's own clocks and the power cap are normal: not listed."""
MAX_XIDS: Final = 32
"""The number of a device's newest XIDs that are kept: a broken device may report without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """A driver's reading of one device at one moment; None for values that the driver does not offer."""

    index: int
    name: str = ""
    uuid: str = ""
    utilization_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    ecc_uncorrected: int | None = None
    """The uncorrectable memory errors since the driver was loaded."""
    remap_failed: bool | None = None
    """A memory row is broken and could not be replaced."""
    lost: bool = False
    """The driver cannot reach the device any more."""
    needs_reset: bool = False
    """The driver requires a reset of the device before further use."""
    throttled: str = ""
    """Why the driver runs the device slower than it could; empty while it does not."""
    xids: tuple[int, ...] = ()
    """The last `MAX_XIDS` errors reported since the agent started, in order."""


def fault(
    first: DeviceReading,
    now: DeviceReading,
    *,
    ignored: Collection[int] = (),
) -> str:
    """Return why a device must not be trained on, or "" while it is healthy."""
    if now.lost:
        return "its driver does not reach it any more: it has fallen off the bus"
    if now.needs_reset:
        return "its driver requires a reset"
    for xid in now.xids:
        if xid in FATAL_XIDS and xid not in ignored:
            return f"XID {xid}: {FATAL_XIDS[xid]}"
    if now.remap_failed:
        return "a broken row of its memory could not be replaced"
    grown = (now.ecc_uncorrected or 0) - (first.ecc_uncorrected or 0)
    if grown > 0 and now.ecc_uncorrected is not None:
        return f"{grown} uncorrectable ECC errors since this run began"
    return ""


def throttle_reason(bits: int | None) -> str:
    """Return why a device runs slower than it could, by NVML's clocks event reasons, in words; "" if it does not."""
    return ", ".join(words for bit, words in THROTTLE_REASONS.items() if (bits or 0) & bit)


def visible(
    devices: Iterable[DeviceReading], cuda_visible_devices: str | None
) -> tuple[tuple[DeviceReading, ...], str]:
    """Return the devices that a process with this CUDA_VISIBLE_DEVICES uses, and a sentence on unclear entries.

    The variable is read as CUDA does: numbers or (unique prefixes of) UUIDs, separated by commas; the first entry
    that names no device ends the list. The device of a partition (`MIG-…`) cannot be determined here, so if there
    is one, all devices are watched.
    """
    every = tuple(devices)
    if cuda_visible_devices is None:
        return every, ""
    chosen: list[DeviceReading] = []
    for name in (part.strip() for part in cuda_visible_devices.split(",")):
        if name.startswith("MIG-"):
            return every, f"{name} is a part of a device; all of this host are watched"
        if name.lstrip("-").isdigit():
            found = [each for each in every if each.index == int(name)]
        else:
            found = [each for each in every if name and each.uuid.startswith(name)]
        if len(found) != 1:
            return tuple(chosen), f"{name!r} names no device" if name else ""
        if found[0] in chosen:
            return (), f"{name} is named twice: CUDA sees no device then"
        chosen.append(found[0])
    return tuple(chosen), ""
