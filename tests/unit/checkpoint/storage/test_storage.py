"""File storage only. `tests/contract/storage` has the tests that every storage must pass."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.sink import put
from strata.errors import StorageError

_numbers = itertools.count()


def local(root: Path) -> LocalStorage:
    return LocalStorage(root, nonce=lambda: f"n{next(_numbers)}")


def test_a_link_in_place_of_a_folder_cannot_lead_outside_the_root(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"somebody else's")
    storage = local(tmp_path / "root")
    put(storage, "inside/x", b"ours")
    (tmp_path / "root" / "a").symlink_to(outside)
    (tmp_path / "root" / "b").symlink_to(tmp_path / "root" / "inside")
    for act in (storage.read, storage.delete, storage.size, storage.list):
        with pytest.raises(StorageError, match="lies outside") as error:
            act("a/x" if act != storage.list else "a/b")
        assert "in the place of the link" in error.value.hint
    with pytest.raises(StorageError, match="lies outside"):
        put(storage, "a/y", b"")
    with pytest.raises(StorageError, match="lies outside"):
        storage.create_once("a/z", b"")
    assert [entry.name for entry in outside.iterdir()] == ["x"]
    assert storage.read("b/x") == b"ours", "within the root a link is as good as a folder"
    (tmp_path / "link").symlink_to(tmp_path / "root")
    assert local(tmp_path / "link").read("inside/x") == b"ours", "the root may be one"


def test_a_file_in_place_of_a_folder_is_an_error_not_a_missing_object(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="cannot create") as error:
            local(root).create_once("x", b"")
        assert type(error.value) is StorageError
        assert "is a file" in error.value.hint
        with pytest.raises(StorageError, match="cannot create"):
            put(local(root), "x", b"")


def test_leftovers_of_a_dead_writer_go_with_the_folder(tmp_path: Path) -> None:
    storage = local(tmp_path)
    storage.sink("f/x").begin(4)
    storage.delete_folder("f")
    assert list(tmp_path.iterdir()) == []


def test_every_step_is_announced_in_the_order_that_survives_a_crash(tmp_path: Path) -> None:
    steps: list[str] = []
    storage = LocalStorage(tmp_path, nonce=lambda: "n", on_step=steps.append)
    put(storage, "x", b"1")
    storage.create_once("y", b"2")
    assert steps == [
        "begin x",
        "write x",
        "sync x",
        "link x",
        "sync folder of x",
        "begin y",
        "write y",
        "sync y",
        "link y",
        "sync folder of y",
    ]
    assert not storage.create_once("y", b"2")
    assert steps[-1] == "sync folder of y", "whoever made it may have died between the link and the sync"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_a_storage_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        put(local(tmp_path), "x", b"1")
    tmp_path.chmod(0o700)


# -- holds ------------------------------------------------------------------------------------


def test_a_hold_is_seen_by_other_processes_and_ends_with_its_process(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from strata.checkpoint.storage import local_storage
from strata.checkpoint.storage.local_storage import LocalStorage
storage = LocalStorage(Path(sys.argv[1]), nonce=lambda: "n")
storage.create_once("claim", b"")
storage.hold("claim")
print("held", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        storage = LocalStorage(tmp_path, nonce=lambda: "m")
        assert storage.is_held("claim")
        holder.kill()
        holder.wait()
        assert not storage.is_held("claim")


def test_a_hold_is_seen_with_byte_range_locks_as_on_nfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS an exclusive lock needs a writable descriptor, and a shared lock a readable one."""
    flock = fcntl.flock

    def as_nfs_does(file: IO[bytes], operation: int) -> None:
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        wrong = os.O_RDONLY if operation & fcntl.LOCK_EX else os.O_WRONLY
        if mode == wrong:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", as_nfs_does)
    holder, other = local(tmp_path), local(tmp_path)
    holder.create_once("claim", b"body")
    assert not other.is_held("claim")
    holder.hold("claim")
    assert other.is_held("claim")
    holder.release("claim")
    assert not other.is_held("claim")
    assert other.read("claim") == b"body"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_every_claim_counts_as_held_if_locks_are_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(file: IO[bytes], operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    holder = local(tmp_path)
    holder.create_once("claim", b"")
    assert local(tmp_path).is_held("claim")
    holder.hold("claim")
    assert local(tmp_path).is_held("claim")


def test_a_failing_lock_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were ignored, other processes would find the claim free, and remove this process's save."""

    def fail(file: IO[bytes], operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    holder = local(tmp_path)
    holder.create_once("claim", b"")
    monkeypatch.setattr(fcntl, "flock", fail)
    for act in (holder.hold, holder.is_held):
        with pytest.raises(StorageError, match="Input/output error"):
            act("claim")
    monkeypatch.undo()
    assert not local(tmp_path).is_held("claim")


# -- existence checks -------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ELOOP])
@pytest.mark.parametrize("act", ["exists", "delete_folder"])
def test_a_failed_stat_is_an_error_and_not_an_absent_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, code: int
) -> None:
    """In Python 3.14 `Path.exists` is False for any error, so the storage must not rely on it."""
    storage, stat = local(tmp_path), os.stat
    put(storage, "folder/x", b"1")

    def fail(path: Any, *args: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "folder")):
            raise OSError(code, os.strerror(code))
        return stat(path, *args, **named)

    monkeypatch.setattr(os, "stat", fail)
    for name in ("exists", "is_dir"):
        monkeypatch.setattr(Path, name, lambda path, **_: False)
    acts: dict[str, Callable[[], object]] = {
        "exists": lambda: storage.exists("folder/x"),
        "delete_folder": lambda: storage.delete_folder("folder"),
    }
    with pytest.raises(StorageError, match=re.escape(os.strerror(code))):
        acts[act]()


@pytest.mark.parametrize("name", ["folder/none", "none/x", "folder/x/below"])
def test_a_missing_path_is_absent_and_deleting_it_removes_nothing(tmp_path: Path, name: str) -> None:
    storage = local(tmp_path)
    put(storage, "folder/x", b"1")
    assert not storage.exists(name)
    storage.delete_folder(name)
    assert storage.exists("folder/x")
    assert storage.exists("folder")


# -- construction -----------------------------------------------------------------------------


def test_create_once_leaves_nothing_but_its_object(tmp_path: Path) -> None:
    storage = local(tmp_path)
    assert storage.create_once("x", b"first")
    assert not storage.create_once("x", b"second")
    assert storage.read("x") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
