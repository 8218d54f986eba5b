"""This host's NVIDIA devices as their driver tells of them: one thread's blocking calls into NVML.

The library is given (`pynvml`, of the distribution nvidia-ml-py, or a module with the same functions).
What a device does not offer is None in its reading; a device that is lost or wants a reset says so
with every call, which is how that is known. XIDs come as events: those since the reader was made.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from strata.core.health.devices import MAX_XIDS, DeviceReading, throttle_reason, visible

MAX_EVENTS: Final = 1000
"""Taken at once: a device that reports without end must not hold up what is told of it."""


class NoDevicesError(Exception):
    """There is nothing to read here; the message says why."""


def load_library() -> Any:
    """Return the module pynvml; `NoDevicesError` where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        raise NoDevicesError('pynvml is not installed: pip install "strata-control[gpu]"') from None


class NvmlReader:
    """Reads the devices that a process with this CUDA_VISIBLE_DEVICES uses. All calls in one thread."""

    def __init__(self, library: Any, cuda_visible_devices: str | None) -> None:
        """`NoDevicesError` where there is no driver or no device."""
        self._library = library
        try:
            library.nvmlInit()
            count = library.nvmlDeviceGetCount()
        except library.NVMLError as error:
            raise NoDevicesError(f"NVML: {error}") from None
        self._handles: dict[int, Any] = {}
        self._named: dict[int, DeviceReading] = {}
        found = [self._find(index) for index in range(count)]
        chosen, self.remark = visible(found, cuda_visible_devices)
        """What was not understood of CUDA_VISIBLE_DEVICES."""
        if not chosen:
            raise NoDevicesError("no NVIDIA device is visible here")
        self._chosen = [each.index for each in chosen]
        self._xids: dict[int, list[int]] = {index: [] for index in self._chosen}
        self._events = self._listen()
        self._throttled: dict[int, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """What the devices are called, in their order."""
        return tuple(self._named[index].name or f"device {index}" for index in self._chosen)

    def read(self) -> tuple[DeviceReading, ...]:
        """Return what each device is like at this moment."""
        self.take_events()
        return tuple(self._read(index) for index in self._chosen)

    def take_events(self) -> bool:
        """Take note of the XIDs since the last time; tell whether there were any, or a device's throttling changed."""
        throttled = {index: self._throttle(index) for index in self._chosen if index in self._handles}
        came, self._throttled = throttled != self._throttled, throttled
        for index, xid in self._new_xids():
            for each in [index] if index in self._xids else self._chosen:
                self._xids[each] = [*self._xids[each], xid][-MAX_XIDS:]
            came = True
        return came

    # -- one device

    def _find(self, index: int) -> DeviceReading:
        library = self._library
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
        except library.NVMLError as error:
            lost = error.value == library.NVML_ERROR_GPU_IS_LOST
            self._named[index] = DeviceReading(index=index, lost=lost)
            return self._named[index]
        self._handles[index] = handle
        asked = _Asked(library, handle)
        self._named[index] = DeviceReading(
            index=index,
            name=_text(asked("nvmlDeviceGetName")),
            uuid=_text(asked("nvmlDeviceGetUUID")),
            lost=asked.lost,
        )
        return self._named[index]

    def _read(self, index: int) -> DeviceReading:
        known = self._named[index]
        if index not in self._handles:
            return known
        library = self._library
        ask = _Asked(library, self._handles[index])
        busy = ask("nvmlDeviceGetUtilizationRates")
        memory = ask("nvmlDeviceGetMemoryInfo")
        rows = ask("nvmlDeviceGetRemappedRows")
        temperature = ask("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU)
        power_mw = ask("nvmlDeviceGetPowerUsage")
        uncorrected = ask(
            "nvmlDeviceGetTotalEccErrors",
            library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            library.NVML_VOLATILE_ECC,
        )
        return replace(
            known,
            throttled=self._throttle(index),
            utilization_percent=None if busy is None else int(busy.gpu),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            temperature_c=None if temperature is None else int(temperature),
            power_mw=None if power_mw is None else int(power_mw),
            ecc_uncorrected=None if uncorrected is None else int(uncorrected),
            remap_failed=None if rows is None else bool(rows[3]),
            lost=ask.lost,
            needs_reset=ask.needs_reset,
            xids=tuple(self._xids[index]),
        )

    def _throttle(self, index: int) -> str:
        """Return why a device runs slower than it could; "" if it does not."""
        ask = _Asked(self._library, self._handles[index])
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its name until driver 535
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return throttle_reason(reasons)

    # -- events

    def _listen(self) -> Any:
        """Have XIDs told; return the set that they come in, None where no device tells them."""
        library = self._library
        try:
            events = library.nvmlEventSetCreate()
        except library.NVMLError:
            return None
        heard = False
        for index in self._chosen:
            try:
                handle = self._handles[index]
                library.nvmlDeviceRegisterEvents(handle, library.nvmlEventTypeXidCriticalError, events)
                heard = True
            except (library.NVMLError, KeyError):
                pass  # it does not offer that; its other readings still tell much
        return events if heard else None

    def _new_xids(self) -> Iterator[tuple[int, int]]:
        """Yield each XID with the index of its device, -1 when that cannot be told."""
        library = self._library
        for _ in range(MAX_EVENTS if self._events is not None else 0):
            try:
                event = library.nvmlEventSetWait_v2(self._events, 0)
            except library.NVMLError:
                return  # nothing more for now, or a lost device: its readings say that
            if event.eventType == library.nvmlEventTypeXidCriticalError:
                yield self._index_of(event.device), int(event.eventData)

    def _index_of(self, device: Any) -> int:
        address = _address(device)
        return next((i for i, handle in self._handles.items() if _address(handle) == address), -1)


class _Asked:
    """The calls about one device, and what their failures say of it."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle
        self.lost = False
        self.needs_reset = False

    def __call__(self, function: str, *arguments: Any) -> Any:
        """Return what the function says of the device, None where it does not offer that."""
        if not hasattr(self._library, function):  # an older binding
            return None
        try:
            return getattr(self._library, function)(self._handle, *arguments)
        except self._library.NVMLError as error:
            self.lost |= error.value == self._library.NVML_ERROR_GPU_IS_LOST
            self.needs_reset |= error.value == self._library.NVML_ERROR_RESET_REQUIRED
            return None


def _text(value: Any) -> str:
    """Return a name; older bindings give bytes."""
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _address(handle: Any) -> Any:
    """Return what two handles of one device have in common: a pointer's target."""
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value
    except (ctypes.ArgumentError, TypeError):
        return handle
