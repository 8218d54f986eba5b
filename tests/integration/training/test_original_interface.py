"""The snippets of the original product's interface in docs/api.md run unchanged, each as its own program.

They run against etcd, a coordinator on its default port, and an S3 server. If the default port is taken, the test
writes another port into the snippets.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

import strata
from strata import errors
from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.local_cluster import LocalCluster
from strata.devcluster.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
SECTION = (ROOT / "docs" / "api.md").read_text().partition("## The original interface")[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
BUCKETS = ("my-bucket", "my-checkpoints", "checkpoints")
DETECT_S = 20.0
"""Long, because the snippets send no repeated heartbeats and the machine may be slow."""


@pytest.fixture
def cluster_of_default(etcd_binary: EtcdBinary, tmp_path: Path) -> Iterator[LocalCluster]:
    """One coordinator over one etcd member, on port 50051 if it is free."""

    def start(port: int) -> LocalCluster:
        folder = tmp_path / f"cluster-{port}"
        return LocalCluster.start(
            folder,
            etcd_members=1,
            coordinators=1,
            binary=etcd_binary,
            ports=[port],
            detect_s=DETECT_S,
            fsync=False,
        )

    try:
        cluster = start(50051)
    except (errors.ConfigError, errors.Unavailable):  # another process has the port, or took it meanwhile
        cluster = start(free_port())
    yield cluster
    cluster.kill()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment for an S3 server with the snippets' buckets."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }
    for name in ("AWS_PROFILE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    for bucket in BUCKETS:
        client.create_bucket(Bucket=bucket)
    yield environment
    server.stop()


@pytest.mark.slow
def test_every_snippet_of_the_original_interface_runs(
    cluster_of_default: LocalCluster, s3: dict[str, str], tmp_path: Path
) -> None:
    port = cluster_of_default.endpoints.rpartition(":")[2]
    with (
        strata.DatasetRegistry(coordinator_url=f"localhost:{port}") as registry,
        pytest.raises(errors.NotFound, match="these two calls have to come first"),
    ):
        registry.get_assigned_shards(worker_id="worker-01")

    unset = {"WORLD_SIZE", "GRPC_ENABLE_FORK_SUPPORT"}  # importing strata sets the latter in this process
    kept = {k: v for k, v in os.environ.items() if not k.startswith("STRATA_") and k not in unset}

    def printed(number: int, *, then: str = "") -> list[str]:
        """Return the lines that one snippet prints, followed by the program text `then`."""
        program = tmp_path / f"snippet-{number}.py"
        program.write_text(f"{BLOCKS[number].replace('50051', port)}\n{then}\n")
        done = subprocess.run(
            [sys.executable, str(program)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            cwd=tmp_path,
            env={**kept, **s3, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert len(BLOCKS) == 5
    assert printed(0)[0].split() == [
        f"CheckpointType.{n}" for n in ("FULL", "INCREMENTAL", "OPTIMIZER_ONLY", "MODEL_ONLY")
    ]
    printed(1)
    assert "pages 1" in printed(2)
    indices = json.loads(printed(3, then="print([shard.index for shard in shards])")[-1])
    assert set(indices) <= set(range(64))
    assert indices
    assert printed(4, then="print(state)")[-1] == "{'seen': 6}"
    keys = [found["Key"] for found in boto3.client("s3").list_objects_v2(Bucket="checkpoints")["Contents"]]
    assert any(key.startswith("my-experiment/step-000000001000-") for key in keys)


def test_the_section_has_every_name_of_the_interface() -> None:
    names = (
        "CheckpointManager(storage_path=",
        'CheckpointManager(bucket="my-checkpoints", storage_type="s3")',
        "CheckpointManagerConfig(storage_backend=",
        "CheckpointMetadata(",
        "CheckpointType.ModelOnly",
        "ShardManager(",
        "TrainingOrchestrator(",
        'DatasetRegistry(coordinator_url="localhost:50051")',
        'HeartbeatRequest(worker_id="worker-01")',
        "http://[::1]:50051",
    )
    assert [name for name in names if name not in "".join(BLOCKS)] == []
