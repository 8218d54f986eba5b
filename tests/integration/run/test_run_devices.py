"""A permanently failed device removes its node from the job; the other nodes go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.members_pb2 import DeviceStatus
from tests.cluster_fixtures import ROOT, Nodes, shown

ELASTIC = ("--min-workers", "1", "--max-workers", "2", "--settle-s", "5")
WELL = {"name": "NVIDIA H200", "uuid": "GPU-a", "temperature_c": 41, "ecc_uncorrected": 0}


def put(file: Path, *devices: dict[str, Any]) -> None:
    """Set the devices of the host that reads this file."""
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({"devices": devices}))
    fresh.rename(file)


def host(file: Path) -> dict[str, str | None]:
    """Return the environment of a node whose devices are those in the file."""
    return {
        "PYTHONPATH": os.pathsep.join((str(ROOT / "tests" / "fake_nvml"), str(ROOT))),
        "FAKE_NVML": str(file),
        "STRATA_RUN_TELEMETRY_S": "0.5",
        "STRATA_RUN_TRACES": str(file.parent / "traces"),
    }


def devices(client: CoordinatorClient, worker: str) -> list[DeviceStatus]:
    return [d for member in client.members() if member.worker_id == worker for d in member.device_status]


def test_a_device_that_fails_drains_its_member(cluster: LocalCluster, nodes: Nodes, tmp_path: Path) -> None:
    sick, stop = tmp_path / "sick.json", tmp_path / "stop"
    put(sick, WELL, WELL)
    well = nodes.run(cluster.endpoints, "steps", "--until", str(stop), node="a", options=ELASTIC)
    failing = nodes.run(
        cluster.endpoints, "steps", "--until", str(stop), node="b", options=ELASTIC, env=host(sick)
    )
    nodes.record.wait("step", count=4, generation=1)
    nodes.record.wait_one("devices.found", source="b")
    assert not nodes.record.of("devices.none"), "a host without hardware says nothing of it"
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        nodes.record.until("the devices at a replica", lambda _: devices(client, "b"))
        (device, _other) = devices(client, "b")
        assert (device.name, device.temperature_c, device.fault) == ("NVIDIA H200", 41, "")
        assert not device.HasField("power_mw")
        assert devices(client, "a") == []
    shown("41 °C", "members", "--endpoints", cluster.endpoints, "--job", nodes.job, "--devices")
    put(sick, WELL, {**WELL, "xids": [79]})
    assert failing.join() == 75, "requeue it elsewhere"
    failed = nodes.record.wait_one("device.failed")
    assert failed["reason"] == "XID 79: the GPU has fallen off the bus"
    alone = nodes.record.wait_one("world.joining", source="a", size=1)
    assert "device 1: XID 79" in alone["reason"], "people see why"
    stop.touch()
    assert well.join() == 0


def test_a_node_whose_device_has_failed_does_not_join(
    cluster: LocalCluster, nodes: Nodes, tmp_path: Path
) -> None:
    sick = tmp_path / "sick.json"
    put(sick, WELL, {"handle_error": 15})
    node = nodes.run(cluster.endpoints, "plain", env=host(sick))
    assert node.join() == 4
    line = nodes.record.wait_line("of this node cannot be used")
    assert "device 1 of this node" in line
