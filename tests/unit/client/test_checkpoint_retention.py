from __future__ import annotations

from pathlib import Path

import pytest

from strata.checkpoint.local_storage import LocalStorage
from strata.checkpoint.marker import NAME as MARKER
from strata.checkpoint.removal import remove_objects
from strata.checkpoint.sink import NotAnObject
from strata.client.checkpoints import CheckpointManager
from strata.errors import StorageError
from tests.unit.checkpoint.memory_storage import MemoryStorage


def steps_in(root: Path) -> dict[int, Path]:
    return {int(path.name.split("-")[1]): path for path in root.glob("step-*")}


@pytest.mark.parametrize("ended", [True, False])
def test_what_cannot_be_removed_is_told_and_keeps_nothing_else_from_going(
    tmp_path: Path, ended: bool
) -> None:
    """Neither a checkpoint, nor what is left of a save that never ended."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3, 4):
            manager.save(b"x", step=step).wait()
    folders = steps_in(tmp_path)
    for step in () if ended else (1, 2):
        (folders[step] / MARKER).unlink()
    in_the_way = folders[1] / "rank-00000.json"
    in_the_way.unlink()
    in_the_way.mkdir()
    keeping = CheckpointManager(tmp_path, keep_count=1)
    keeping.save(b"x", step=5).wait()
    with pytest.raises(NotAnObject, match="it is a folder") as error:
        keeping.wait_until_finished()
    assert "move it away" in error.value.hint
    assert set(steps_in(tmp_path)) == {1, 5}
    assert list(folders[1].iterdir()) == [in_the_way], "all else of it has gone"
    in_the_way.rmdir()
    keeping.save(b"x", step=6).wait()
    keeping.close()
    assert set(steps_in(tmp_path)) == {6}


def test_the_marker_goes_first_or_nothing_does_and_then_all_that_can() -> None:
    storage, held = MemoryStorage(), {MARKER}
    names = [MARKER, "manifest.json", "rank-00000.safetensors", "rank-00000.json", "rank-00001.safetensors"]
    storage.objects |= {f"f/{name}": b"x" for name in names}

    def fault(verb: str, name: str) -> None:
        if verb == "delete" and name.rpartition("/")[2] in held:
            raise StorageError(f"cannot delete {name}")

    storage.fault = fault
    with pytest.raises(StorageError, match=MARKER):
        remove_objects(storage, "f")
    assert len(storage.objects) == len(names)
    held = {"manifest.json", "rank-00000.safetensors"}
    with pytest.raises(StorageError, match="manifest") as error:
        remove_objects(storage, "f")
    assert "rank-00000.safetensors" in error.value.__notes__[0]
    assert sorted(storage.objects) == ["f/manifest.json", "f/rank-00000.safetensors"]
    held = set()
    remove_objects(storage, "f")
    assert not storage.objects


def test_an_unfinished_file_that_cannot_be_removed_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    names = [f".x.n{number}.tmp" for number in range(4)]
    for name in names:
        (folder / name).write_bytes(b"")
    unlink = Path.unlink

    def busy(path: Path, missing_ok: bool = False) -> None:
        if path.name == stuck:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", busy)
    stuck = next(folder.iterdir()).name
    storage = LocalStorage(tmp_path, nonce=lambda: "n")
    with pytest.raises(StorageError, match="not permitted"):
        storage.delete_folder("f")
    assert [path.name for path in folder.iterdir()] == [stuck]
    stuck = ""
    storage.delete_folder("f")
    assert not folder.exists()
