"""A device fails permanently under a torchrun agent: the agent has to leave its job."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from strata.integrations.torchrun.member import Preempted
from tests.cluster_fixtures import ROOT
from tests.integration.torchrun.test_torchrun_members import Agents, agents, joined, open_store
from tests.processes import LIMIT_S

__all__ = ["agents"]


class Devices:
    """Two devices, one of which fails at the test's command."""

    def __init__(self, file: Path, library: Any) -> None:
        self._file = file
        self._library = library
        self._write([{"name": "H200"}] * 2)

    def fail(self, index: int) -> None:
        """Make the driver lose this device permanently."""
        devices = [{"name": "H200"}] * 2
        devices[index] = {"name": "H200", "error": self._library.NVML_ERROR_GPU_IS_LOST}
        self._write(devices)

    def _write(self, devices: list[Any]) -> None:
        # after it reads a half-written file, the agent reads again only a minute later
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps({"devices": devices}))
        fresh.rename(self._file)


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Devices:
    file = tmp_path / "nvml.json"
    monkeypatch.setenv("FAKE_NVML", str(file))
    monkeypatch.setenv("STRATA_RUN_TELEMETRY_S", "0.5")
    spec = importlib.util.spec_from_file_location("pynvml", ROOT / "tests" / "fake_nvml" / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    spec.loader.exec_module(library)
    return Devices(file, library)


async def test_an_agent_whose_device_fails_has_to_leave(agents: Agents, devices: Devices) -> None:
    agent = agents.start("a", min_nodes=1, max_nodes=1)
    await joined(agent)
    devices.fail(0)
    assert await agent.comes_true(lambda: agent.notice_for_member is not None, LIMIT_S)
    assert agent.notice_for_member is not None
    assert "device 0: its driver does not reach it any more" in agent.notice_for_member.reason


async def test_a_spare_whose_device_fails_leaves(
    agents: Agents, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each agent has its own device.

    Only the spare's device fails: if the first agent's device failed too, the spare might take that agent's place.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    await joined(agents.start("a", min_nodes=1, max_nodes=1, settle_s=0.0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    spare = agents.start("b", min_nodes=1, max_nodes=1, settle_s=0.0)
    joining = asyncio.create_task(spare.join(None, open_store))
    assert await spare.comes_true(lambda: spare.standing_by, LIMIT_S)
    devices.fail(1)
    with pytest.raises(Preempted, match="does not reach it any more"):
        async with asyncio.timeout(LIMIT_S):
            await joining
