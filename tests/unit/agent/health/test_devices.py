"""Devices read through a fake NVML, and the reaction to a failed device."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from strata.agent.health import draining
from strata.agent.health.devices import DeviceThread, DeviceWatch, OpenDevices, open_devices
from strata.agent.health.draining import prepare_devices, watching_devices
from strata.agent.health.nvml import NoDevicesError, NvmlReader
from strata.agent.health.traces import FILE_VARIABLES
from strata.config import HealthConfig
from strata.errors import Refused, Unavailable
from strata.v1.members_pb2 import DeviceStatus
from strata.v1.worlds_pb2 import STOP_ACTION_DRAIN

FAKE = Path(__file__).resolve().parents[3] / "fake_nvml" / "pynvml.py"
WELL = {
    "name": "H200",
    "uuid": "GPU-a",
    "temperature_c": 40,
    "utilization_percent": 97,
    "memory_bytes": [10, 100],
    "power_mw": 650_000,
    "ecc_uncorrected": 1,
    "remap_failed": 0,
}
LOST, RESET = 15, 16


class Host:
    """A host whose devices a test can change."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = tmp_path / "nvml.json"
        monkeypatch.setenv("FAKE_NVML", str(self._file))
        spec = importlib.util.spec_from_file_location("pynvml", FAKE)
        assert spec is not None
        assert spec.loader is not None
        self.library: Any = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "pynvml", self.library)
        spec.loader.exec_module(self.library)

    def has(self, *devices: dict[str, Any]) -> None:
        """Set the host's devices; a later call replaces them."""
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps({"devices": devices}))
        temporary.rename(self._file)

    def reader(self, visible: str | None = None) -> NvmlReader:
        return NvmlReader(self.library, visible)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


# -- reading devices


def test_a_device_is_read_in_full(host: Host) -> None:
    host.has(WELL)
    (reading,) = host.reader().read()
    assert (reading.name, reading.uuid, reading.temperature_c) == ("H200", "GPU-a", 40)
    assert (reading.memory_used_bytes, reading.memory_total_bytes) == (10, 100)
    assert (reading.power_mw, reading.ecc_uncorrected, reading.remap_failed) == (650_000, 1, False)
    assert not reading.lost


def test_values_that_a_device_does_not_offer_are_absent(host: Host) -> None:
    host.has({"name": "T4"})
    reader = host.reader()
    (reading,) = reader.read()
    assert reader.names == ("T4",)
    assert (reading.uuid, reading.temperature_c, reading.ecc_uncorrected) == ("", None, None)
    assert not reading.lost
    assert not reading.needs_reset


def test_each_device_reports_its_own_xids_since_the_reader_opened(host: Host) -> None:
    host.has({**WELL, "xids": [13]}, WELL)
    reader = host.reader()
    assert [each.xids for each in reader.read()] == [(), ()]
    assert not reader.take_events()
    host.has({**WELL, "xids": [13]}, {**WELL, "xids": [31, 79]})
    assert reader.take_events()
    assert [each.xids for each in reader.read()] == [(), (31, 79)]


def test_a_device_that_becomes_hot_is_read_at_once(host: Host) -> None:
    host.has(WELL, {**WELL, "clocks_event_reasons": 0x4})
    reader = host.reader()
    assert [each.throttled for each in reader.read()] == ["", ""], "a power limit is how devices work"
    assert not reader.take_events()
    host.has(WELL, {**WELL, "clocks_event_reasons": 0x44})
    assert reader.take_events()
    assert [each.throttled for each in reader.read()] == ["", "hot: hardware thermal slowdown"]
    assert not reader.take_events(), "it is known by now"


@pytest.mark.parametrize(("error", "says"), [(LOST, "lost"), (RESET, "needs_reset")])
def test_a_failed_device_is_reported_as_lost_or_in_need_of_a_reset(host: Host, error: int, says: str) -> None:
    host.has(WELL, WELL)
    reader = host.reader()
    host.has(WELL, {**WELL, "error": error})
    healthy, sick = reader.read()
    assert not healthy.lost
    assert getattr(sick, says)
    assert sick.uuid == "GPU-a", "what was known of it still names it"


def test_a_device_lost_before_the_start_is_reported(host: Host) -> None:
    host.has(WELL, {"handle_error": LOST})
    assert [each.lost for each in host.reader().read()] == [False, True]


def test_only_visible_devices_are_read(host: Host) -> None:
    host.has(WELL, {**WELL, "uuid": "GPU-b"})
    assert [each.index for each in host.reader("GPU-b").read()] == [1]
    with pytest.raises(NoDevicesError, match="visible"):
        host.reader("")


async def test_a_host_without_a_driver_has_no_devices(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await open_devices(None) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert await open_devices(None) is None, "and so has one without the library"


# -- watching devices


class LiveReports:
    """The agent's reports: this class records the sent reports, and answers as the test chooses."""

    def __init__(self) -> None:
        self.devices_: list[Sequence[DeviceStatus]] = []
        self.requests: list[Any] = []
        self.news = asyncio.Event()
        self.refusing = False
        self.unfit: list[str] = []

    def devices(self, devices: Sequence[DeviceStatus]) -> None:
        self.devices_.append(devices)
        self.news.set()

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        self.requests.append(request)
        self.news.set()
        if self.refusing:
            raise Unavailable("nobody is there")

    async def until(self, met: Any) -> None:
        async with asyncio.timeout(10):
            while not met():
                self.news.clear()
                await self.news.wait()


def opened(host: Host) -> OpenDevices:
    reader = host.reader()
    return OpenDevices(reader=reader, thread=DeviceThread(), names=reader.names)


@asynccontextmanager
async def watched(host: Host, **health: Any) -> AsyncIterator[LiveReports]:
    reports = LiveReports()
    config = HealthConfig(telemetry_s=0.5, **health)
    async with watching_devices(
        opened(host), config, reports, job="j", worker_id="w", grace_s=30, on_unfit=reports.unfit.append
    ):
        yield reports


async def test_a_fatal_error_drains_the_member_and_is_reported_at_once(host: Host) -> None:
    host.has(WELL, WELL)
    async with watched(host) as reports:
        await reports.until(lambda: reports.devices_)
        assert [device.fault for device in reports.devices_[0]] == ["", ""]
        host.has(WELL, {**WELL, "xids": [79]})
        await reports.until(lambda: reports.requests)
        (request,) = reports.requests
        assert (request.job, request.action, list(request.worker_ids)) == ("j", STOP_ACTION_DRAIN, ["w"])
        assert request.reason == "device 1: XID 79: the GPU has fallen off the bus"
        assert reports.unfit == [request.reason], "a standby cannot be drained: it leaves"
        assert [device.fault != "" for device in reports.devices_[-1]] == [False, True]
        count = len(reports.devices_)
        await reports.until(lambda: len(reports.devices_) > count + 1)
        assert len(reports.requests) == 1, "once for all readings"


async def test_a_drain_is_requested_until_a_coordinator_accepts_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "AGAIN_S", 0.05)
    host.has(WELL)
    async with watched(host) as reports:
        reports.refusing = True
        await reports.until(lambda: reports.devices_)
        host.has({**WELL, "ecc_uncorrected": 2})
        await reports.until(lambda: len(reports.requests) > 2)


@pytest.mark.parametrize("health", [{"drain_on_fault": False}, {"ignored_xids": ("79",)}])
async def test_no_member_is_drained_if_its_configuration_excludes_it(
    host: Host, health: dict[str, Any]
) -> None:
    host.has(WELL)
    async with watched(host, **health) as reports:
        await reports.until(lambda: reports.devices_)
        host.has({**WELL, "xids": [79]})
        await reports.until(lambda: list(reports.devices_[-1][0].xids) == [79])
        assert reports.requests == reports.unfit == []


async def test_a_node_with_a_sick_device_does_not_join(host: Host, tmp_path: Path) -> None:
    host.has(WELL, {"handle_error": LOST})
    config = HealthConfig(traces=str(tmp_path))
    with pytest.raises(Refused, match="device 1 of this node cannot be used"):
        await prepare_devices(config, "j", {})
    devices = await prepare_devices(HealthConfig(traces=str(tmp_path), drain_on_fault=False), "j", {})
    assert devices is not None
    devices.thread.stop()


async def test_ranks_record_their_collectives_on_a_host_with_devices(host: Host, tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    config = HealthConfig(traces=str(tmp_path / "traces"))
    assert await prepare_devices(config, "j", environment) is None
    assert environment == {}
    host.has(WELL)
    devices = await prepare_devices(config, "j", environment)
    assert devices is not None
    assert devices.names == ("H200",)
    devices.thread.stop()
    assert environment[FILE_VARIABLES[0]].startswith(str(tmp_path / "traces" / "j"))
    assert (tmp_path / "traces" / "j").is_dir()
    assert await prepare_devices(HealthConfig(devices=False), "j", {}) is None


async def test_a_driver_that_hangs_holds_up_nothing(host: Host) -> None:
    thread = DeviceThread()
    never = threading.Event()
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await thread.call(never.wait)
    finally:
        never.set()
        thread.stop()


async def test_an_error_in_the_device_thread_is_raised_at_the_caller() -> None:
    thread = DeviceThread()
    try:
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda: 1 // 0)
        assert await thread.call(lambda: 7) == 7
    finally:
        thread.stop()


async def test_a_watch_reports_each_fault_once(host: Host) -> None:
    host.has({**WELL, "error": LOST})
    faults: list[str] = []
    reports = LiveReports()
    watch = DeviceWatch(
        opened(host), tell=reports.devices, on_fault=faults.append, telemetry_s=0.5, ignored_xids=()
    )
    running = asyncio.create_task(watch.run())
    try:
        await reports.until(lambda: len(reports.devices_) > 2)
    finally:
        running.cancel()
    assert faults == ["device 0: its driver does not reach it any more: it has fallen off the bus"]
