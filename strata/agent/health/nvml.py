"""NVML: reads this host's NVIDIA devices from their driver, with blocking calls from one thread.

The caller passes the library (`pynvml`, of the distribution nvidia-ml-py, or a module with the same functions).
A value that a device does not offer is None in the device's reading. The reader detects a device that is lost
or needs a reset by the error of its calls. XIDs come as events; the reader gets only XIDs that occur after its
creation.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from strata.core.health.devices import MAX_XIDS, DeviceReading, throttle_reason, visible

MAX_EVENTS: Final = 1000
"""The most XIDs taken in one call: a device that never stops sending XIDs must not delay its own failure report."""


class NoDevicesError(Exception):
    """No device can be read on this host; the message says why."""


def load_library() -> Any:
    """Return the module pynvml; `NoDevicesError` if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        raise NoDevicesError('pynvml is not installed: pip install "strata-control[gpu]"') from None


class NvmlReader:
    """Reads the devices that a process with this CUDA_VISIBLE_DEVICES uses. Make all calls in one thread."""

    def __init__(self, library: Any, cuda_visible_devices: str | None) -> None:
        """`NoDevicesError` if there is no driver or no device."""
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
        """The part of CUDA_VISIBLE_DEVICES that was not understood."""
        if not chosen:
            raise NoDevicesError("no NVIDIA device is visible here")
        self._chosen = [each.index for each in chosen]
        self._xids: dict[int, list[int]] = {index: [] for index in self._chosen}
        self._events = self._listen()
        self._throttled: dict[int, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The devices' product names, in their order."""
        return tuple(self._named[index].name or f"device {index}" for index in self._chosen)

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the current reading of each device."""
        self.take_events()
        return tuple(self._read(index) for index in self._chosen)

    def take_events(self) -> bool:
        """Take the XIDs since the last call; tell whether there were any, or a device's throttling changed."""
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
        calls = _DeviceCalls(library, handle)
        self._named[index] = DeviceReading(
            index=index,
            name=_text(calls("nvmlDeviceGetName")),
            uuid=_text(calls("nvmlDeviceGetUUID")),
            lost=calls.lost,
        )
        return self._named[index]

    def _read(self, index: int) -> DeviceReading:
        known = self._named[index]
        if index not in self._handles:
            return known
        library = self._library
        ask = _DeviceCalls(library, self._handles[index])
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
        ask = _DeviceCalls(self._library, self._handles[index])
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # drivers up to 535 have the older function
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return throttle_reason(reasons)

    # -- events

    def _listen(self) -> Any:
        """Subscribe to XIDs; return the event set, or None if no device reports XIDs."""
        library = self._library
        try:
            events = library.nvmlEventSetCreate()
        except library.NVMLError:
            return None
        subscribed = False
        for index in self._chosen:
            try:
                handle = self._handles[index]
                library.nvmlDeviceRegisterEvents(handle, library.nvmlEventTypeXidCriticalError, events)
                subscribed = True
            except (library.NVMLError, KeyError):
                pass  # the device does not report XIDs; its other readings are still useful
        return events if subscribed else None

    def _new_xids(self) -> Iterator[tuple[int, int]]:
        """Yield each XID with the index of its device, or -1 if the device is unknown."""
        library = self._library
        for _ in range(MAX_EVENTS if self._events is not None else 0):
            try:
                event = library.nvmlEventSetWait_v2(self._events, 0)
            except library.NVMLError:
                return  # no more events for now, or the device is lost, which its readings show
            if event.eventType == library.nvmlEventTypeXidCriticalError:
                yield self._index_of(event.device), int(event.eventData)

    def _index_of(self, device: Any) -> int:
        address = _address(device)
        return next((i for i, handle in self._handles.items() if _address(handle) == address), -1)


class _DeviceCalls:
    """Calls NVML functions on one device, and records the errors that show that the device is lost or needs a
    reset.
    """

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle
        self.lost = False
        self.needs_reset = False

    def __call__(self, function: str, *arguments: Any) -> Any:
        """Return the function's result for the device, or None if the device does not offer it."""
        if not hasattr(self._library, function):  # an older pynvml
            return None
        try:
            return getattr(self._library, function)(self._handle, *arguments)
        except self._library.NVMLError as error:
            self.lost |= error.value == self._library.NVML_ERROR_GPU_IS_LOST
            self.needs_reset |= error.value == self._library.NVML_ERROR_RESET_REQUIRED
            return None


def _text(value: Any) -> str:
    """Return a name as text; older versions of pynvml return bytes."""
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _address(handle: Any) -> Any:
    """Return a device's address; two handles of the same device have equal addresses."""
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value
    except (ctypes.ArgumentError, TypeError):
        return handle
