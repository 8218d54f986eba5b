"""Devices of a real driver, on machines that have some."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.agent.health.devices import open_devices
from strata.core.health.devices import fault
from tests.conftest import need

HARDWARE = Path("/dev/nvidiactl").exists()


@pytest.mark.gpu
async def test_a_real_device_is_read() -> None:
    need("gpu", HARDWARE, "run it on a host with an NVIDIA device")
    devices = await open_devices(None)
    assert devices is not None, "the log says why"
    try:
        first = await devices.thread.call(devices.reader.read)
        again = await devices.thread.call(devices.reader.read)
    finally:
        devices.thread.stop()
    for before, now in zip(first, again, strict=True):
        assert now.name
        assert now.uuid.startswith("GPU-")
        assert now.memory_total_bytes is None or now.memory_total_bytes > 1 << 30
        assert not now.lost
        assert fault(before, now) == ""
