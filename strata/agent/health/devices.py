"""The agent's watch over its node's accelerators: telemetry to the coordinators, and a drain when a device fails.

A driver may hang for minutes over a dying device. So one daemon thread makes all calls into the driver: a call that
hangs blocks neither the event loop nor the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from strata.agent.health.nvml import NoDevicesError, NvmlReader, load_library
from strata.core.health.devices import DeviceReading, fault
from strata.observe import get_logger
from strata.v1.members_pb2 import DeviceStatus
from strata.wire.members import device_message

log = get_logger()

T = TypeVar("T")

OPEN_S: Final = 10.0
"""How long this node waits for the driver at its start; then it joins without watching devices."""
EVENTS_S: Final = 1.0
"""How often the watch polls for XIDs (the driver's error events); a fatal XID has an effect after at most this
delay.
"""
SILENT_S: Final = 60.0
"""After this long without an answer of the driver, a warning is logged."""


class DeviceThread:
    """One daemon thread for calls that may block for long; it makes them one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="strata-devices", daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        """Return `function()`, called in the thread. Cancelling ends the wait, not the call."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]  # it is the result when there is no error

        def call() -> None:
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - raised again where the call is awaited
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(settle, result, failure)

        self._calls.put(call)
        return await answer

    def stop(self) -> None:
        """End the thread after the calls already queued; does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDevices:
    """The devices of this node, and the thread that may call their driver."""

    reader: NvmlReader
    thread: DeviceThread
    names: tuple[str, ...]


async def open_devices(cuda_visible_devices: str | None) -> OpenDevices | None:
    """Return this node's devices; None, with a line in the log, if there are none to watch."""
    thread = DeviceThread()
    try:
        async with asyncio.timeout(OPEN_S):
            reader = await thread.call(lambda: NvmlReader(load_library(), cuda_visible_devices))
    except NoDevicesError as why:
        thread.stop()
        # devices that cannot be read deserve a warning; a node without devices does not
        (log.warning if _has_hardware() else log.debug)("devices.none", reason=str(why))
        return None
    except TimeoutError:
        thread.stop()
        log.warning("devices.none", reason=f"the driver did not answer within {OPEN_S:g} s")
        return None
    log.info("devices.found", names=list(reader.names), remark=reader.remark or None)
    return OpenDevices(reader=reader, thread=thread, names=reader.names)


def _has_hardware() -> bool:
    return Path("/dev/nvidiactl").exists()


class DeviceWatch:
    """Reports the state of devices, and the permanent failure of each failed device once."""

    def __init__(
        self,
        devices: OpenDevices,
        *,
        tell: Callable[[Sequence[DeviceStatus]], None],
        on_fault: Callable[[str], None],
        telemetry_s: float,
        ignored_xids: Collection[int],
    ) -> None:
        self._devices = devices
        self._tell = tell
        self._on_fault = on_fault
        self._telemetry_s = telemetry_s
        self._ignored = ignored_xids
        self._first: dict[int, DeviceReading] = {}
        self._failed: set[int] = set()

    async def run(self) -> None:
        """Read devices every `telemetry_s`, or earlier after an XID or a change of throttling, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._take(await self._call_driver(self._devices.reader.read))
            due_s = loop.time() + self._telemetry_s
            while (left_s := due_s - loop.time()) > 0:
                await asyncio.sleep(min(EVENTS_S, left_s))
                if await self._call_driver(self._devices.reader.take_events):
                    break

    async def _call_driver(self, function: Callable[[], T]) -> T:
        """Return the driver's answer, however long that takes; log a warning if it takes long."""
        silence = asyncio.get_running_loop().call_later(
            SILENT_S, lambda: log.warning("devices.silent", reason=f"no answer for {SILENT_S:g} s")
        )
        try:
            return await self._devices.thread.call(function)
        finally:
            silence.cancel()

    def _take(self, readings: Sequence[DeviceReading]) -> None:
        statuses, failures = [], []
        for reading in readings:
            first = self._first.setdefault(reading.index, reading)
            why = fault(first, reading, ignored=self._ignored)
            statuses.append(device_message(reading, why))
            if why and reading.index not in self._failed:
                self._failed.add(reading.index)
                log.error("device.failed", device=reading.index, uuid=reading.uuid, reason=why)
                failures.append(f"device {reading.index}: {why}")
        self._tell(statuses)
        if failures:
            self._on_fault("; ".join(failures))
