"""`strata controlplane restore` and `rebuild` with an etcd in memory: changes between the plan and the write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from strata.checkpoint.format.marker import read_marker
from strata.checkpoint.storage.root import COORDINATED
from strata.cli.app import assembled
from strata.cli.etcd import access
from strata.client.checkpoints.manager import CheckpointManager
from strata.controlplane import storage_search
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import CheckpointRecord, decode
from strata.core.kv.txn import Put, Range, Txn, TxnResult, read_prefix
from strata.errors import ConfigError, Conflict, NotFound, StrataError
from strata.testing.memory_client import MemoryClient
from strata.testing.memory_store import MemoryStore

KEYS = ClusterKeys("default")
OURS = "aaaa"


def own(folder: Path, owner: str) -> None:
    body = {"format": "strata-root", "version": 1, "owner": owner, "id": "i"}
    (folder / "strata.json").write_text(json.dumps(body))


class Rig:
    """A root with the steps 10, 20 and 30 of job gpt, an empty etcd, and a function called at the first transaction."""

    def __init__(self, folder: Path) -> None:
        self.root, self._aside = folder / "root", folder / "aside"
        with CheckpointManager(self.root / "gpt") as manager:
            for step in (10, 20, 30):
                state = {"w": np.full(10, step, dtype=np.float32), "step": step}
                manager.save_state(state, step=step).wait()
        own(self.root, COORDINATED)
        own(self.root / "gpt", f"{COORDINATED}:{OURS}/gpt")
        self._aside.mkdir()
        self.memory = MemoryStore()
        self.at_first: Callable[[], object] = lambda: None

    async def open_store(self, _config: object, *, timeout_s: float) -> MemoryClient:
        del timeout_s
        client = self.memory.client()
        execute = client.execute

        async def first(txn: Txn) -> TxnResult:
            at_first, self.at_first = self.at_first, lambda: None
            at_first()
            return await execute(txn)

        client.execute = first  # type: ignore[method-assign]  # so that a test can act before the transaction
        return client

    def folder(self, step: int) -> Path:
        (found,) = (self.root / "gpt").glob(f"step-{step:012d}-*")
        return found

    def hide(self, path: Path) -> Callable[[], object]:
        """Move a file or a folder away; return a function that moves it back."""
        aside = self._aside / path.name
        shutil.move(path, aside)
        return lambda: shutil.move(aside, path)

    def run(self, *words: object) -> Any:
        argv = ["controlplane", *map(str, words), "--etcd", "127.0.0.1:1", "--yes", "--json"]
        result = CliRunner().invoke(assembled("controlplane"), argv, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["jobs"][0]

    def fails(self, *words: object) -> tuple[StrataError, str]:
        argv = ["controlplane", *map(str, words), "--etcd", "127.0.0.1:1", "--yes"]
        result = CliRunner().invoke(assembled("controlplane"), argv)
        assert isinstance(result.exception, StrataError), result.output
        return result.exception, result.stderr

    def steps(self) -> set[int]:
        kvs = self.memory.read(read_prefix(KEYS.job("gpt").checkpoints)).kvs
        return {decode(CheckpointRecord, kv.value).step for kv in kvs if kv.key.count("/") == 8}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(tmp_path)
    monkeypatch.setattr(access, "open_store", rig.open_store)
    return rig


@pytest.mark.parametrize("what", ["folder", "marker"])
def test_a_checkpoint_committed_between_plan_and_write_is_adopted(
    rig: Rig, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank writes the commit marker while the storage is slow, or before the operator confirms."""
    folder = rig.folder(30)
    rig.at_first = rig.hide(folder if what == "folder" else folder / "COMMIT")
    looks: list[str] = []

    def noted(storage: Any, name: str) -> Any:
        looks.append(name.rpartition("/")[2])
        return read_marker(storage, name)

    monkeypatch.setattr(storage_search, "read_marker", noted)
    mine = rig.run("rebuild", "--storage", rig.root)
    assert [slot["step"] for slot in mine["adopted"]] == [10, 20, 30]
    assert mine["latest"] == 30
    assert rig.steps() == {10, 20, 30}
    assert looks.count(rig.folder(10).name) == 1, "what was proven is not read again"


def test_a_checkpoint_removed_between_plan_and_write_is_not_adopted(rig: Rig) -> None:
    rig.at_first = lambda: shutil.rmtree(rig.folder(10))
    mine = rig.run("rebuild", "--storage", rig.root)
    assert [slot["step"] for slot in mine["adopted"]] == [20, 30]
    assert rig.steps() == {20, 30}


def test_a_root_that_disappears_during_a_rebuild_leaves_a_restore_to_run_again(rig: Rig) -> None:
    rig.at_first = lambda: rig.hide(rig.root / "strata.json")
    error, output = rig.fails("rebuild", "--storage", rig.root)
    assert isinstance(error, NotFound)
    assert "no coordinator serves until it is done; run the same command again" in output
    assert rig.memory.read(Range(key=KEYS.restoring)).kvs


def test_lineage_is_accepted_only_with_a_place_of_backups(rig: Rig) -> None:
    error, _printed = rig.fails("restore", "--in-place", "--lineage", OURS)
    assert isinstance(error, ConfigError)
    snapshot = rig.root / "snapshot.db"
    snapshot.write_bytes(b"x")
    error, _printed = rig.fails("restore", "--from", snapshot, "--lineage", OURS)
    assert isinstance(error, ConfigError)


def test_a_job_that_writes_before_the_operator_confirms_aborts_the_rebuild(rig: Rig) -> None:
    late = Txn(success=(Put(key=KEYS.job("gpt").latest, value=b"late"),))
    rig.at_first = lambda: rig.memory.execute(late)
    error, output = rig.fails("rebuild", "--storage", rig.root)
    assert isinstance(error, Conflict)
    assert output == ""
    assert not rig.memory.read(Range(key=KEYS.restoring)).kvs
