"""Durations of a save's phases, as a rank measures them and reports them with its ack or its copy."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.catalog.protocol import SavePhase, SaveRequest
from strata.checkpoint.copies.far_copy import FarCopy, Replica
from strata.checkpoint.copies.tiers import TieredStorage
from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.snapshot.staging import Staging
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.core.kv.records import CheckpointType
from strata.errors import StorageError
from tests.unit.checkpoint.copies.test_tiers import Pair
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import an_info, local_catalog, snapshot_of
from tests.unit.checkpoint.writer_rig import LIMIT_S, Rig


def phases(info: Any) -> dict[str, SavePhase]:
    return {each.phase: each for each in info.phases}


def test_a_snapshot_and_a_write_have_their_bytes_and_their_backend(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, nonce=iter(map(str, range(99))).__next__)
    info = an_info(1)
    state = {"x": bytes(3 * CHUNK_BYTES)}
    began_s = time.monotonic()
    Saver(storage=storage, catalog=local_catalog(storage), commit_timeout_s=5).save(
        snapshot_of(state), SaveRequest(step=1), info
    )
    took_s = time.monotonic() - began_s
    found = phases(info)
    assert set(found) == {"snapshot", "write"}
    (image,) = tmp_path.rglob("*.safetensors")
    for phase in found.values():
        assert phase.backend == "file"
        assert phase.size_bytes == image.stat().st_size
        assert 0 < phase.took_s < took_s


def test_an_incremental_writes_the_bytes_that_changed() -> None:
    storage = MemoryStorage()
    catalog, infos = local_catalog(storage), (an_info(1), an_info(2))
    saver = Saver(storage=storage, catalog=catalog, commit_timeout_s=5)
    state = {"frozen": bytes(4 * CHUNK_BYTES), "step": bytes(CHUNK_BYTES)}
    saver.save(snapshot_of(state), SaveRequest(step=1), infos[0])
    changed = {**state, "step": b"2" * CHUNK_BYTES}
    saver.save(snapshot_of(changed), SaveRequest(step=2, type=CheckpointType.INCREMENTAL), infos[1])
    whole, less = (phases(info) for info in infos)
    assert less["snapshot"].size_bytes == whole["snapshot"].size_bytes > 5 * CHUNK_BYTES
    assert CHUNK_BYTES < less["write"].size_bytes < 2 * CHUNK_BYTES


def test_a_write_that_falls_back_to_the_far_storage_reports_its_backend(tmp_path: Path) -> None:
    near, far = MemoryStorage(), LocalStorage(tmp_path, nonce=iter(map(str, range(99))).__next__)
    near.fail(StorageError("disk full", transient="disk full"), "begin", name=".safetensors")
    both, info = TieredStorage(near, far), an_info(1)
    Saver(storage=both, catalog=local_catalog(both), commit_timeout_s=5).save(
        snapshot_of({"x": b"1" * 1000}), SaveRequest(step=1), info
    )
    assert phases(info)["write"].backend == "file"


def test_a_snapshot_takes_as_long_as_the_trainer_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    run = Staging.run

    def slowly(self: Staging, threads: int) -> None:
        time.sleep(0.2)
        run(self, threads)

    monkeypatch.setattr(Staging, "run", slowly)
    began_s = time.monotonic()
    info = rig.write(1, {"x": bytes(1 << 20)})
    took_s = time.monotonic() - began_s
    info.wait(LIMIT_S)
    rig.writer.close()
    assert 0.2 <= phases(info)["snapshot"].took_s <= took_s


def test_with_little_memory_there_is_no_snapshot_to_measure() -> None:
    rig = Rig(low_memory=True)
    info = rig.write(1).wait(LIMIT_S)
    rig.writer.close()
    assert set(phases(info)) == {"write"}


def test_a_copy_is_reported_with_the_bytes_that_were_not_there_yet() -> None:
    pair = Pair()
    base, incremental = pair.with_incremental()
    reported: list[tuple[int, SavePhase]] = []

    def report(replica: Replica, *, digest: str = "", phase: SavePhase | None = None, **_: Any) -> None:
        if digest and phase is not None:
            reported.append((replica.step, phase))

    copy = FarCopy(
        pair.near, pair.far, rank=0, ranks=1, world="w", report=report, closed=threading.Event().is_set
    )
    copy.copy(base)
    copy.copy(incremental)
    copy.copy(incremental)  # nothing left to copy
    pair.replicator.close()
    assert [(step, phase.phase) for step, phase in reported] == [(1, "copy"), (2, "copy")]
    of_base, of_incremental = (phase for _step, phase in reported)
    assert of_base.size_bytes > 3 * CHUNK_BYTES > 2 * CHUNK_BYTES > of_incremental.size_bytes > CHUNK_BYTES
    assert of_base.took_s > 0
