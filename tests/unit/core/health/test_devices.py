"""Readings that make an accelerator unfit for training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strata.core.health.devices import FATAL_XIDS, DeviceReading, fault, throttle_reason, visible

HEALTHY = DeviceReading(index=0, uuid="GPU-aa", ecc_uncorrected=2, remap_failed=False)


def test_a_healthy_device_has_no_fault() -> None:
    assert fault(HEALTHY, HEALTHY) == ""
    assert fault(DeviceReading(index=0), DeviceReading(index=0)) == "", "what is not offered is no fault"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lost": True}, "fallen off the bus"),
        ({"needs_reset": True}, "requires a reset"),
        ({"xids": (31, 79)}, "XID 79: the GPU has fallen off the bus"),
        ({"remap_failed": True}, "could not be replaced"),
        ({"ecc_uncorrected": 3}, "1 uncorrectable ECC errors since this run began"),
    ],
)
def test_a_fatal_reading_is_named(change: dict[str, Any], says: str) -> None:
    assert says in fault(HEALTHY, replace(HEALTHY, **change))


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 92, 94, 9999])
def test_application_and_contained_errors_drain_no_member(xid: int) -> None:
    assert fault(HEALTHY, replace(HEALTHY, xids=(xid,))) == ""


@pytest.mark.parametrize("xid", FATAL_XIDS)
def test_every_fatal_error_is_named_and_can_be_ignored(xid: int) -> None:
    now = replace(HEALTHY, xids=(xid,))
    assert f"XID {xid}" in fault(HEALTHY, now)
    assert fault(HEALTHY, now, ignored=(xid,)) == ""


def test_an_error_counter_reset_is_no_fault() -> None:
    assert fault(HEALTHY, replace(HEALTHY, ecc_uncorrected=0)) == ""
    assert fault(HEALTHY, replace(HEALTHY, ecc_uncorrected=None)) == ""


DEVICES = tuple(DeviceReading(index=i, uuid=f"GPU-{'abcd'[i] * 4}") for i in range(4))


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-b,3", [1, 3]),
        ("1,-1,2", [1]),
        ("1,7,2", [1]),
        ("GPU-,0", []),
        ("1,1", []),
        ("MIG-12/0/0", [0, 1, 2, 3]),
    ],
)
def test_only_devices_that_cuda_would_use_are_watched(variable: str | None, indices: list[int]) -> None:
    chosen, _why = visible(DEVICES, variable)
    assert [each.index for each in chosen] == indices


def test_an_unknown_entry_of_cuda_visible_devices_is_named() -> None:
    assert visible(DEVICES, "1,7")[1] == "'7' names no device"
    assert visible(DEVICES, "")[1] == ""


def test_a_throttled_device_is_one_that_heat_or_power_slows_down_and_not_one_at_its_power_limit() -> None:
    assert throttle_reason(None) == throttle_reason(0) == throttle_reason(0x1 | 0x2 | 0x4) == ""
    assert throttle_reason(0x4 | 0x40) == "hot: hardware thermal slowdown"
    assert throttle_reason(0x80 | 0x8) == "hardware slowdown, power brake"
