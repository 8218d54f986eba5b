"""Two storages and damage in either: a restore uses the nearest intact copy, and logs the damage."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import nullcontext as nothing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.copies.copying import copy_checkpoint
from strata.checkpoint.copies.tiers import FarUnreachable
from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.storage import root
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.sink import Sink, Source
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.kv.records import CheckpointType
from strata.errors import CheckpointCorrupt, StorageError
from tests.unit.checkpoint.copies.test_copier import until_raised

ITEMS = CHUNK_BYTES // 4 + 100

Damage = Callable[[Path], None]


def state(value: int) -> dict[str, object]:
    return {"weights": np.full(ITEMS, value, dtype=np.float32)}


def two(path: Path) -> CheckpointManager:
    return CheckpointManager(path / "near", replica_path=path / "far", capture_rng=False)


def save(path: Path, *steps: int, copied: bool = True) -> None:
    """Save these steps to the near storage and, if `copied`, to the far one."""
    with two(path) if copied else CheckpointManager(path / "near", capture_rng=False) as manager:
        for step in steps:
            manager.save_state(state(step), step)


def restored(path: Path, step: int | None = None) -> int | None:
    """Return the restored step, after checking that the values are those of that step."""
    with two(path) as manager:
        found = state(0)
        checkpoint = manager.restore(found, step)
        if checkpoint is None:
            return None
        assert np.array_equal(found["weights"], state(checkpoint.step)["weights"])  # type: ignore[arg-type]  # an array
        return checkpoint.step


def damaged(root: Path, step: int, pattern: str, damage: Damage) -> None:
    (file,) = root.glob(f"step-{step:012d}-*/{pattern}")
    damage(file)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def remove(file: Path) -> None:
    file.unlink()


FILES = ("COMMIT", "manifest.json", "rank-00000.json", "rank-00000.safetensors")
EACH = [(pattern, damage) for pattern in FILES for damage in (flip, cut, remove)]


@pytest.mark.parametrize(("pattern", "damage"), EACH)
def test_an_intact_far_copy_is_restored_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pattern: str, damage: Damage
) -> None:
    save(tmp_path, 1, 2)
    damaged(tmp_path / "near", 2, pattern, damage)
    assert restored(tmp_path) == 2
    assert restored(tmp_path, 2) == 2
    if damage is not remove:  # a missing near copy is no damage: a new host has no near copy
        warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert any(pattern in message and f"{tmp_path}/far" in message for message in warnings), warnings


@pytest.mark.parametrize(("pattern", "damage"), [one for one in EACH if one != ("COMMIT", remove)])
def test_without_a_good_copy_the_previous_step_is_restored_and_an_error_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pattern: str, damage: Damage
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, copied=False)  # it was never copied
    damaged(tmp_path / "near", 2, pattern, damage)
    assert restored(tmp_path) == 1
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert any("step 2" in message and pattern in message for message in errors), errors
    with pytest.raises(CheckpointCorrupt, match=pattern) as error:
        restored(tmp_path, 2)
    assert error.value.hint


@pytest.mark.parametrize(("pattern", "damage"), [one for one in EACH if one != ("COMMIT", remove)])
def test_a_restore_fails_if_every_checkpoint_is_damaged(tmp_path: Path, pattern: str, damage: Damage) -> None:
    save(tmp_path, 1, copied=False)
    damaged(tmp_path / "near", 1, pattern, damage)
    with pytest.raises(CheckpointCorrupt, match=pattern) as error:
        restored(tmp_path)
    assert "copy" in error.value.hint


def test_a_restore_returns_none_only_for_an_empty_root(tmp_path: Path) -> None:
    assert restored(tmp_path) is None


def test_both_copies_damaged_are_both_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2)
    damaged(tmp_path / "near", 2, "*.safetensors", flip)
    damaged(tmp_path / "far", 2, "*.safetensors", cut)
    assert restored(tmp_path) == 1
    (message,) = {r.getMessage() for r in caplog.records if "the one before" in r.getMessage()}
    assert "chunk 1" in message
    assert f"rank-00000.safetensors has {far_size(tmp_path, 2)} bytes instead of" in message


def far_size(path: Path, step: int) -> int:
    (image,) = (path / "far").glob(f"step-{step:012d}-*/*.safetensors")
    return image.stat().st_size


def flip_first(file: Path) -> None:
    """Flip a bit in the first chunk of an image; `flip` damages one of the last chunks."""
    data = bytearray(file.read_bytes())
    data[CHUNK_BYTES // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(("near", "far"), [(flip, flip_first), (flip_first, flip), (flip_first, cut)])
def test_two_damaged_copies_are_named_and_repair_makes_a_whole_copy(
    tmp_path: Path, near: Damage, far: Damage
) -> None:
    save(tmp_path, 1, 2)
    damaged(tmp_path / "near", 2, "*.safetensors", near)
    damaged(tmp_path / "far", 2, "*.safetensors", far)
    with pytest.raises(CheckpointCorrupt) as error:
        restored(tmp_path, 2)
    assert error.value.message.count("rank-00000.safetensors") == 2, "what is wrong with each"
    assert "strata checkpoints repair" in error.value.hint
    before = {path: path.read_bytes() for path in tmp_path.glob("*/step-*/*")}
    assert repaired(tmp_path, 2) == 2
    assert {path: path.read_bytes() for path in tmp_path.glob("*/step-*/*") if path in before} == before


@pytest.mark.parametrize("damage", [flip, cut, remove])
@pytest.mark.parametrize(("here", "there"), [*itertools.permutations(FILES, 2)])
def test_any_two_different_files_may_be_damaged_one_in_each_copy_for_a_repair(
    tmp_path: Path, here: str, there: str, damage: Damage
) -> None:
    save(tmp_path, 2)
    damaged(tmp_path / "near", 2, here, damage)
    damaged(tmp_path / "far", 2, there, damage)
    assert repaired(tmp_path, 2) == 2


def test_a_repair_includes_an_incrementals_base_and_fails_if_both_copies_are_damaged(
    tmp_path: Path,
) -> None:
    with two(tmp_path) as manager:
        for step, kind in ((1, "full"), (2, "incremental")):
            manager.save_state(state(7) | {"hot": step}, step, checkpoint_type=kind).wait(20)
        manager.wait_until_replicated(20)
    damaged(tmp_path / "near", 1, "*.safetensors", flip)
    damaged(tmp_path / "far", 1, "*.safetensors", flip_first)
    assert repaired(tmp_path, 2, to="one") == 7
    damaged(tmp_path / "near", 1, "*.safetensors", flip_first)
    with pytest.raises(CheckpointCorrupt, match=r"step-000000000001.*bytes"):
        repaired(tmp_path, 2, to="two")
    with CheckpointManager(tmp_path / "two", capture_rng=False) as manager:
        assert manager.all_checkpoints() == [], "what could not be made whole is no checkpoint"


def repaired(path: Path, step: int, *, to: str = "whole") -> object:
    """Copy one whole checkpoint from both damaged copies, and return the weights that it restores."""
    near, far, target = (LocalStorage(path / name, nonce=lambda: "n") for name in ("near", "far", to))
    (folder,) = {found.name for found in path.glob(f"*/step-{step:012d}-*")}
    root.claim(target, root.STANDALONE)
    copy_checkpoint([near, far], target, folder, "", on_bytes=lambda _: None)
    with CheckpointManager(path / to, capture_rng=False) as manager:
        found = state(0)
        assert manager.restore(found) is not None
        (value,) = set(np.asarray(found["weights"]).tolist())
        return value


def saved_after(path: Path, step: int, *, far: bool = True) -> list[CheckpointType]:
    """Restore in a new manager, save two Incrementals from `step` on, and return their types."""
    settings: dict[str, Any] = {"replica_path": path / "far"} if far else {}
    with CheckpointManager(path / "near", capture_rng=False, **settings) as manager:
        found = state(0) | {"hot": 0}
        assert manager.restore({"weights": found["weights"]}) is not None
        types = []
        for number in (step, step + 1):
            info = manager.save_state(found | {"hot": number}, number, checkpoint_type="incremental")
            types.append(info.wait(20).checkpoint_type)
        return types


WHOLE_ONCE = [CheckpointType.FULL, CheckpointType.INCREMENTAL]


@pytest.mark.parametrize("damage", [flip, flip_first, remove])
def test_no_save_builds_on_a_damaged_checkpoint_until_a_full_save(tmp_path: Path, damage: Damage) -> None:
    """This includes a checkpoint that only the far storage has: each copy must be complete by itself."""
    save(tmp_path, 2)
    damaged(tmp_path / "near", 2, "*.safetensors", damage)
    assert saved_after(tmp_path, 3) == WHOLE_ONCE
    for copy in ("near", "far"):
        assert_whole(tmp_path / copy, 4, value=2)


@pytest.mark.parametrize("far", [True, False])
def test_an_incremental_does_not_use_a_base_that_a_restore_found_damaged(tmp_path: Path, far: bool) -> None:
    """Steps 2 and 3 both take their weights from step 1, and only step 2 was read."""
    settings: dict[str, Any] = {"replica_path": tmp_path / "far"} if far else {}
    with CheckpointManager(tmp_path / "near", capture_rng=False, **settings) as manager:
        for step, kind in ((1, "full"), (2, "incremental"), (3, "incremental")):
            manager.save_state(state(7) | {"hot": step}, step, checkpoint_type=kind).wait(20)
    damaged(tmp_path / "near", 1, "*.safetensors", flip)
    with CheckpointManager(tmp_path / "near", capture_rng=False, **settings) as manager:
        with nothing() if far else pytest.raises(CheckpointCorrupt):
            manager.restore(state(0), step=2)
        types = []
        for step in (4, 5):
            info = manager.save_state(state(7) | {"hot": step}, step, checkpoint_type="incremental")
            types.append(info.wait(20).checkpoint_type)
    assert types == WHOLE_ONCE
    assert_whole(tmp_path / "near", 5)


def test_an_incremental_does_not_use_a_base_that_the_copier_found_damaged(tmp_path: Path) -> None:
    """Only the copier read the image, and its copy fails. The state in memory is intact and is saved whole."""
    with CheckpointManager(tmp_path / "near", capture_rng=False) as manager:
        manager.save_state(state(7) | {"hot": 1}, 1).wait(20)
    damaged(tmp_path / "near", 1, "*.safetensors", flip)
    types = []
    with two(tmp_path) as manager:
        for step in (2, 3, 4):
            info = manager.save_state(state(7) | {"hot": step}, step, checkpoint_type="incremental")
            types.append(info.wait(20).checkpoint_type)
            with pytest.raises(CheckpointCorrupt, match="step-000000000001") if step == 2 else nothing():
                manager.wait_until_replicated(20)
    assert types == [CheckpointType.INCREMENTAL, *WHOLE_ONCE]
    for copy in ("near", "far"):
        assert_whole(tmp_path / copy, 4)


def assert_whole(root: Path, step: int, *, value: int = 7) -> None:
    """Assert that the newest checkpoint below `root` is that of `step`, with the weights of `state(value)`."""
    with CheckpointManager(root, capture_rng=False) as manager:
        found = state(0)
        checkpoint = manager.restore(found)
        assert checkpoint is not None
        assert checkpoint.step == step
        assert np.array_equal(found["weights"], state(value)["weights"])  # type: ignore[arg-type]  # an array


def test_no_save_builds_on_a_checkpoint_skipped_as_damaged(tmp_path: Path) -> None:
    """Its manifests are intact, so it counts as the newest checkpoint, but an unchanged tensor is damaged."""
    with CheckpointManager(tmp_path / "near", capture_rng=False) as manager:
        for step in (1, 2):
            manager.save_state(state(7) | {"hot": step}, step)
    damaged(tmp_path / "near", 2, "*.safetensors", flip)
    assert saved_after(tmp_path, 3, far=False) == WHOLE_ONCE
    assert_whole(tmp_path / "near", 4)


def test_a_damaged_copy_with_the_other_unreachable_is_an_error_not_an_older_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    damaged(tmp_path / "near", 2, "*.safetensors", flip)
    source = LocalStorage.source

    def away(storage: LocalStorage, name: str) -> Source:
        if storage.root == tmp_path / "far":  # a server that goes down in the middle
            raise StorageError(f"{name} cannot be asked for")
        return source(storage, name)

    with two(tmp_path) as manager:
        monkeypatch.setattr(LocalStorage, "source", away)
        with pytest.raises(FarUnreachable, match=r"chunk 1.*cannot be asked for"):
            manager.restore(state(0))


def test_rank_texts_come_from_the_far_copy_if_the_near_one_is_damaged(tmp_path: Path) -> None:
    with two(tmp_path) as manager:
        manager.save_state({**state(1), "cursor": {"shard": "seven"}}, 1)
    damaged(tmp_path / "near", 1, "rank-00000.json", flip)
    with two(tmp_path) as manager:
        (checkpoint,) = manager.all_checkpoints()
        assert manager.texts_of_ranks(checkpoint, "cursor", "shard") == {0: "seven"}


def test_a_failed_copy_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = LocalStorage.sink

    def broken(storage: LocalStorage, name: str) -> Sink:
        if storage.root == tmp_path / "far" and name.startswith("step-"):
            raise OSError("the device is gone")  # no storage of ours raises this
        return sink(storage, name)

    monkeypatch.setattr(LocalStorage, "sink", broken)
    manager = two(tmp_path)
    for step, ask in enumerate(
        (manager.check_for_errors, manager.wait_until_finished, manager.wait_until_replicated, manager.close),
        1,
    ):
        assert manager.save_state(state(step), step).wait(20).committed
        waits = ask not in (manager.check_for_errors, manager.wait_until_finished)
        with pytest.raises(StorageError, match=f"step {step} is not copied.*the device is gone"):
            ask() if waits else until_raised(ask)
