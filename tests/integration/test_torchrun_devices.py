"""A device that fails for good under a torchrun agent: the agent is asked to leave its job."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.cluster_fixtures import ROOT
from tests.integration.test_torchrun_members import Agents, agents, joined
from tests.processes import LIMIT_S

__all__ = ["agents"]


async def test_an_agent_whose_device_fails_is_asked_to_leave(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nvml.json"
    file.write_text(json.dumps({"devices": [{"name": "H200"}]}))
    monkeypatch.setenv("FAKE_NVML", str(file))
    monkeypatch.setenv("STRATA_RUN_TELEMETRY_S", "0.5")
    spec = importlib.util.spec_from_file_location("pynvml", ROOT / "tests" / "fake_nvml" / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    spec.loader.exec_module(library)

    agent = agents.start("a", min_nodes=1, max_nodes=1)
    await joined(agent)
    file.write_text(json.dumps({"devices": [{"name": "H200", "error": library.NVML_ERROR_GPU_IS_LOST}]}))
    assert await agent.comes_true(lambda: agent.asked_to_leave is not None, LIMIT_S)
    assert agent.asked_to_leave is not None
    assert "device 0: its driver does not reach it any more" in agent.asked_to_leave.reason
