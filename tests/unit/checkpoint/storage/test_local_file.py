from __future__ import annotations

import ctypes
import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.snapshot.memory import PAGE_BYTES, address_of, allocate
from strata.checkpoint.storage import local_file
from strata.checkpoint.storage.local_file import DIRECT_BYTES, LocalSource
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.pipeline import write_image
from strata.checkpoint.storage.sink import put
from strata.errors import StorageError

SIZE = 3 * DIRECT_BYTES + 1234
REFUSED = [errno.EINVAL, errno.EOPNOTSUPP]


def local(root: Path) -> LocalStorage:
    numbers = iter(range(1000))
    return LocalStorage(root, nonce=lambda: str(next(numbers)))


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return local(tmp_path)


@pytest.fixture(scope="module")
def data() -> memoryview:
    """Return bytes that begin at a page boundary."""
    block = allocate(SIZE, inherited=True)[:SIZE]
    block[:] = random.Random(0).randbytes(SIZE)
    return block.toreadonly()


def unaligned(data: memoryview) -> memoryview:
    copied = allocate(len(data) + 1, inherited=True)[1 : len(data) + 1]
    copied[:] = data
    return copied


@pytest.fixture(params=["direct", "refused at open", "refused at use"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Direct I/O as this file system offers it, and two variants in which it is refused: at open, and at use."""
    real_open = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *more, **named)

    if request.param == "refused at open":
        monkeypatch.setattr(os, "open", refuse)
    elif request.param == "refused at use":
        _refuse_use(monkeypatch)
    return str(request.param)


def _refuse_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let descriptors for direct I/O be opened, but refuse their use."""
    direct: set[int] = set()
    real = {name: getattr(os, name) for name in ("open", "close", "pwrite", "preadv")}

    def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
        fd: int = real["open"](path, flags, *more, **named)
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def used(name: str) -> Any:
        def use(fd: int, *more: Any) -> Any:
            if fd in direct:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real[name](fd, *more)

        return use

    monkeypatch.setattr(os, "open", opened)
    for name in ("pwrite", "preadv"):
        monkeypatch.setattr(os, name, used(name))


@pytest.mark.parametrize("lies", ["aligned", "unaligned"])
def test_a_written_image_is_read_back(storage: LocalStorage, data: memoryview, lies: str, how: str) -> None:
    given = data if lies == "aligned" else unaligned(data)
    sink = storage.sink("x")
    sink.begin(SIZE)
    write_image(sink, [given])
    sink.finish()
    assert storage.read("x") == data
    buffer = allocate(SIZE + 1, inherited=True)
    into = buffer[:SIZE] if lies == "aligned" else buffer[1 : SIZE + 1]
    source = storage.source("x")
    assert source.read_into(0, into) == SIZE
    source.close()
    assert into == data


@pytest.mark.parametrize("cut", [1, 4095, 4096, 4097, DIRECT_BYTES + 1, 2 * DIRECT_BYTES - 1])
def test_writes_may_meet_at_any_offset(storage: LocalStorage, data: memoryview, cut: int) -> None:
    """The writes' edges share a page: either all writes of this page use the page cache, or none does."""
    for order in ((0, 1), (1, 0)):
        sink = storage.sink(f"x{order[0]}")
        sink.begin(SIZE)
        parts = [(0, data[:cut]), (cut, data[cut:])]
        for index in order:
            sink.write_at(*parts[index])
        sink.finish()
        assert storage.read(f"x{order[0]}") == data


@pytest.mark.parametrize("offset", [0, 1, 4096, 5000, SIZE - DIRECT_BYTES - 1, SIZE - 5, SIZE, SIZE + 9999])
@pytest.mark.parametrize("count", [10, DIRECT_BYTES, DIRECT_BYTES + 4097, SIZE])
def test_any_range_is_read_as_far_as_the_file_goes(
    storage: LocalStorage, data: memoryview, offset: int, count: int
) -> None:
    (storage.root / "x").write_bytes(data)
    source = LocalSource(storage.root / "x")
    for shift in (0, 7):
        into = allocate(count + shift, inherited=True)[shift : shift + count]
        expected = data[offset : offset + count]
        assert source.read_into(offset, into) == len(expected)
        assert into[: len(expected)] == expected
        assert not any(into[len(expected) : len(expected) + 100]), "and nothing behind it"
    source.close()


def test_a_new_file_has_its_final_size_and_its_blocks_reserved(storage: LocalStorage) -> None:
    sink = storage.sink("x")
    sink.begin(SIZE)
    (temporary,) = storage.root.iterdir()
    assert temporary.stat().st_size == SIZE
    assert temporary.stat().st_blocks * 512 >= SIZE - PAGE_BYTES
    sink.abort()
    sink.abort()
    assert list(storage.root.iterdir()) == []


@pytest.mark.parametrize("code", [*REFUSED, errno.ENOSYS])
def test_a_file_system_that_reserves_nothing_is_written_all_the_same(
    storage: LocalStorage, data: memoryview, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_file, "C_LIBRARY", _Refusing(code))
    sink = storage.sink("x")
    sink.begin(SIZE)
    sink.write_at(0, data)
    sink.finish()
    assert storage.read("x") == data


def test_a_full_disk_fails_the_save_before_anything_is_written(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_file, "C_LIBRARY", _Refusing(errno.ENOSPC))
    sink = storage.sink("x")
    with pytest.raises(StorageError, match="No space left") as caught:
        sink.begin(SIZE)
    assert "keep fewer" in caught.value.hint
    sink.abort()
    assert list(storage.root.iterdir()) == []


class _Refusing:
    """A C library whose calls fail with one code."""

    def __init__(self, code: int) -> None:
        self._code = code

    def fallocate(self, *_: object) -> int:
        ctypes.set_errno(self._code)
        return -1


def test_a_link_that_an_nfs_client_repeats_is_a_success(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats the link after an NFS server's restart, and gets the answer that the name exists."""
    link = os.link

    def repeated(*names: Path) -> None:
        link(*names)
        link(*names)

    monkeypatch.setattr(os, "link", repeated)
    put(storage, "x", b"1")
    assert (storage.read("x"), len(list(storage.root.iterdir()))) == (b"1", 1)


def test_an_object_seen_by_another_process_stays_if_the_folder_sync_fails(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """t1: the name exists. t2: another process sees that. t3: the creator's sync of the folder fails."""
    other, sync = LocalStorage(storage.root, nonce=lambda: "other"), local_file.sync_folder
    created: list[bool] = []

    def fails(path: Path) -> None:
        monkeypatch.setattr(local_file, "sync_folder", sync)
        created.append(other.create_once("x", b"2"))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert storage.create_once("before", b"0")
    monkeypatch.setattr(local_file, "sync_folder", fails)
    with pytest.raises(StorageError):
        storage.create_once("x", b"1")
    assert created == [False], "it is there"
    assert storage.read("x") == b"1"


def test_memory_begins_at_a_page() -> None:
    for size in (1, 5000, 3 << 20):
        block = allocate(size, inherited=False)
        assert address_of(block) % PAGE_BYTES == 0
        assert len(block) >= size
        assert len(block) % PAGE_BYTES == 0
