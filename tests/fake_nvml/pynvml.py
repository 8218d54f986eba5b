"""A stand-in for pynvml on hosts without a GPU, with the functions that Strata calls.

Its devices are in the JSON file that FAKE_NVML names. Each call reads the file again, so that a test can let a device
fail under a running program. `tests/contract/test_nvml.py` compares it with the real pynvml.

    {"devices": [{"name": "H200", "uuid": "GPU-a", "temperature_c": 40, "xids": [79], "error": 15}]}

A device does not support the properties that its entry lacks. `error` is the NVML error that every call about the
device raises.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_TEMPERATURE_GPU = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
nvmlEventTypeXidCriticalError = 8  # noqa: N816  # the library's names


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    gpu: int
    memory: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    used: int
    total: int
    free: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    device: int
    eventType: int  # noqa: N815  # the library's names
    eventData: int  # noqa: N815


class _Events:
    """The number of each device's XIDs that this event set has already delivered."""

    def __init__(self) -> None:
        self.reported: dict[int, int] = {}


def _devices() -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(Path(os.environ["FAKE_NVML"]).read_text())["devices"]
    except (KeyError, FileNotFoundError):
        raise NVMLError(NVML_ERROR_DRIVER_NOT_LOADED) from None
    return found


def _offered(handle: int, name: str) -> Any:
    device = _devices()[handle]
    if device.get("error"):
        raise NVMLError(device["error"])
    if name not in device:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return device[name]


# ruff: noqa: N802, N803  # the library's names


def nvmlInit() -> None:
    _devices()


def nvmlDeviceGetCount() -> int:
    return len(_devices())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    error = _devices()[index].get("handle_error")
    if error:
        raise NVMLError(error)
    return index


def nvmlDeviceGetName(handle: int) -> str:
    return str(_offered(handle, "name"))


def nvmlDeviceGetUUID(handle: int) -> str:
    return str(_offered(handle, "uuid"))


def nvmlDeviceGetUtilizationRates(handle: int) -> _Rates:
    return _Rates(gpu=_offered(handle, "utilization_percent"))


def nvmlDeviceGetMemoryInfo(handle: int, version: int | None = None) -> _Memory:
    used, total = _offered(handle, "memory_bytes")
    return _Memory(used=used, total=total)


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    return int(_offered(handle, "temperature_c"))


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return int(_offered(handle, "power_mw"))


def nvmlDeviceGetTotalEccErrors(handle: int, errorType: int, counterType: int) -> int:
    return int(_offered(handle, "ecc_uncorrected"))


def nvmlDeviceGetRemappedRows(device: int) -> tuple[int, int, int, int]:
    return 0, 0, 0, int(_offered(device, "remap_failed"))


def nvmlDeviceGetCurrentClocksEventReasons(handle: int) -> int:
    return int(_offered(handle, "clocks_event_reasons"))


def nvmlEventSetCreate() -> _Events:
    return _Events()


def nvmlDeviceRegisterEvents(handle: int, eventTypes: int, eventSet: _Events) -> None:
    eventSet.reported[handle] = len(_devices()[handle].get("xids", ()))


def nvmlEventSetWait_v2(eventSet: _Events, timeoutms: int) -> _Event:
    for handle, reported in eventSet.reported.items():
        xids = _devices()[handle].get("xids", ())
        if len(xids) > reported:
            eventSet.reported[handle] = reported + 1
            return _Event(device=handle, eventType=nvmlEventTypeXidCriticalError, eventData=xids[reported])
    raise NVMLError(NVML_ERROR_TIMEOUT)
