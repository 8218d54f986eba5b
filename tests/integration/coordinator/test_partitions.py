"""States sharded over several ranks: saved by four, restored by two and by one, bit by bit the same."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from strata.checkpoint.convert.file_export import choose, export
from strata.checkpoint.format.image import ALIGNMENT
from strata.checkpoint.format.manifest import RankManifest
from strata.checkpoint.storage.local_storage import LocalStorage
from tests.processes import Record, Talker

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 300.0
NETWORK_BYTES = 4 * (33 * 17 + 17 + 17 * 5 + 5)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("partitions")


@pytest.fixture(scope="module")
def record(storage: Path) -> Record:
    """The events of the worlds of `tests.ranks.partitions`."""
    record = Record()
    (storage / "meet").mkdir()
    command = [sys.executable, "-m", "tests.ranks.partitions", str(storage), str(storage / "meet")]
    talker = Talker(command, name="partitions", record=record, cwd=ROOT)
    assert talker.join(limit_s=LIMIT_S) == 0, record.events
    talker.wait_quiet()
    assert [event["codes"] for event in record.of("world")] == [[0, 0, 0, 0], [0, 0]], record.events
    return record


@pytest.mark.slow
def test_dcp_restores_fsdp_of_four_ranks_on_two_and_on_one(record: Record, storage: Path) -> None:
    saved = record.of("saved")
    parts = [
        entry.shard.offsets
        for path in (storage / "dcp").glob("step-*/rank-*.json")
        for name, entry in RankManifest.from_bytes(path.read_bytes(), what=path.name).tensors.items()
        if name == "model.0.weight" and entry.shard is not None
    ]
    assert sorted(parts) == [(0, 0), (5, 0), (10, 0), (15, 0)], "each of four ranks has its part, and no more"
    (digest,) = {event["digest"] for event in saved}
    assert [event["committed"] for event in saved if event["rank"] == 0] == [3]
    loaded = record.of("loaded")
    assert len(loaded) == 3
    assert {event["digest"] for event in loaded} == {digest}
    assert all(event["before"] != digest for event in loaded)
    assert all(event["note"] == {"lr": [0.1, None], "name": "run"} for event in loaded)


def test_dcp_saves_in_a_thread_and_in_a_process_of_its_own(record: Record) -> None:
    assert [(event["kind"], event["same"]) for event in record.of("in background")] == [
        ("THREAD", True),
        ("PROCESS", True),
    ]


def test_dcp_writes_replicated_tensors_once(record: Record, storage: Path) -> None:
    images = list((storage / "ddp").glob("step-*/*.safetensors"))
    assert len(images) == 4
    sizes = [image.stat().st_size - ALIGNMENT for image in images]
    assert sum(sizes) == NETWORK_BYTES


def test_a_manager_restores_a_state_of_four_ranks_on_two_and_on_one(record: Record) -> None:
    (digest,) = {event["digest"] for event in record.of("natively saved")}
    loaded = record.of("natively loaded")
    assert len(loaded) == 3
    assert {event["digest"] for event in loaded} == {digest}
    assert all(event["halves"] == list(range(12)) for event in loaded)


def test_an_unsharded_state_is_restored_sharded(record: Record) -> None:
    (saved,) = record.of("saved alone")
    sharded = record.of("sharded")
    assert [event["digest"] for event in sharded] == [saved["digest"]] * 2


def test_a_manager_writes_replicated_tensors_once(record: Record, storage: Path) -> None:
    written = dict.fromkeys(("ddp", "same", "halves"), 0)
    holders = dict.fromkeys(written, 0)
    for path in (storage / "native").glob("job/step-*/rank-*.json"):
        manifest = RankManifest.from_bytes(path.read_bytes(), what=path.name)
        for name, entry in manifest.tensors.items():
            key = re.split("[.@]", name)[0]
            if key in written:
                assert entry.replicated
                written[key] += sum(entry.chunk_bytes(number) for number, _, _ in entry.located())
                holders[key] += 1
    assert written == {"ddp": NETWORK_BYTES, "same": 12, "halves": 48}
    assert holders == {"ddp": 16, "same": 4, "halves": 4}


@pytest.mark.journey
def test_jax_arrays_are_restored_on_other_devices(tmp_path: Path) -> None:
    record = Record()
    talker = Talker(
        [sys.executable, "-m", "tests.ranks.devices", str(tmp_path)],
        name="devices",
        record=record,
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"},
    )
    assert talker.join(limit_s=LIMIT_S) == 0, record.events
    restored = record.of("restored")
    assert [event["shape"] for event in restored] == [[2, 2], [4, 1], [1, 2], [1, 1]]
    assert all(event["same"] and event["lies_as_before"] and event["one_is_an_array"] for event in restored)


def test_a_sharded_state_is_exported_whole(record: Record, storage: Path, tmp_path: Path) -> None:
    assert record.of("saved")
    found = {}
    for root, folder in ((storage / "native", "job/"), (storage / "alone", "job/")):
        (step,) = (root / "job").glob("step-*")
        manifests = [
            RankManifest.from_bytes(path.read_bytes(), what=path.name)
            for path in sorted(step.glob("rank-*.json"))
        ]
        out = tmp_path / f"{root.name}.safetensors"
        export(
            LocalStorage(root, nonce=lambda: "n"),
            f"{folder}{step.name}",
            choose(manifests, rank=None, only="fsdp"),
            out,
            file_format="safetensors",
            replace=False,
            on_bytes=lambda count: None,
        )
        found[root.name] = load_file(out)
    assert found["native"].keys() == found["alone"].keys()
    for name, value in found["native"].items():
        np.testing.assert_allclose(value, found["alone"][name], rtol=1e-5)
