"""One contract for every storage: every test here runs on each storage."""

from __future__ import annotations

import random
import threading

import pytest

from strata.checkpoint.format.manifest import GLOBAL_NAME
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.restore.reader import load
from strata.checkpoint.storage.removal import remove_objects
from strata.checkpoint.storage.s3_storage import S3Storage
from strata.checkpoint.storage.sink import NotAnObject, ObjectMissing, Storage, put
from strata.documents.parsing import MAX_DOCUMENT_BYTES
from strata.errors import InvalidArgument, StorageError
from tests.unit.checkpoint.saves import local_catalog, save

LARGE_BYTES = (8 << 20) + 12_345
"""Longer than one part of an upload, and not a multiple of the part size."""


def test_an_object_appears_whole_when_it_is_finished(storage: Storage) -> None:
    sink = storage.sink("a/b/c.bin")
    sink.begin(10)
    sink.write_at(5, b"world")
    sink.write_at(0, memoryview(b"hello"))
    assert not storage.exists("a/b/c.bin")
    assert storage.list("a/b") == []
    sink.finish()
    sink.abort()
    assert storage.read("a/b/c.bin") == b"helloworld"
    assert storage.size("a/b/c.bin") == 10
    assert (storage.list(), storage.list("a"), storage.list("a/b")) == (["a"], ["b"], ["c.bin"])
    assert storage.exists("a/b")
    assert not storage.exists("a/b/c")


def test_a_large_object_comes_in_any_order_by_several_threads(storage: Storage) -> None:
    data = random.Random(1).randbytes(LARGE_BYTES + (8 << 20))
    sink = storage.sink("f/large")
    sink.begin(len(data))
    block = 1 << 20
    starts = list(range(0, len(data), block))
    for start in (starts[0], starts[-1]):
        sink.write_at(start, memoryview(data)[start : start + block])
    rest = iter(starts[1:-1])
    lock = threading.Lock()

    def write() -> None:
        while True:
            with lock:
                start = next(rest, None)
            if start is None:
                return
            room = bytearray(data[start : start + block])
            sink.write_at(start, room)
            room[:] = b"\0" * len(room)  # a writable block belongs to the caller again

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not storage.exists("f/large")
    sink.finish()
    assert storage.size("f/large") == len(data)
    found = bytearray(len(data))
    source = storage.source("f/large")
    half = len(data) // 2
    assert source.read_into(half, memoryview(found)[half:]) == len(data) - half
    assert source.read_into(0, memoryview(found)[:half]) == half
    source.close()
    assert found == data


def test_a_large_object_may_come_backwards(storage: Storage) -> None:
    data = random.Random(2).randbytes(LARGE_BYTES)
    sink = storage.sink("f/large")
    sink.begin(len(data))
    for start in reversed(range(0, len(data), 1 << 20)):
        sink.write_at(start, memoryview(data)[start : start + (1 << 20)])
    assert not storage.exists("f/large")
    sink.finish()
    assert storage.read("f/large") == data


@pytest.mark.parametrize("size", [1, LARGE_BYTES])
def test_an_aborted_object_does_not_exist(storage: Storage, size: int) -> None:
    sink = storage.sink("a/x")
    sink.begin(size)
    sink.write_at(0, b"x")
    sink.abort()
    sink.abort()
    assert not storage.exists("a/x")
    storage.delete_folder("a")
    assert storage.list() == []


def test_bytes_outside_of_the_object_are_refused(storage: Storage) -> None:
    sink = storage.sink("x")
    sink.begin(4)
    with pytest.raises(StorageError):
        sink.write_at(2, b"abc")
    sink.abort()


@pytest.mark.parametrize("size", [1, LARGE_BYTES])
def test_a_finished_object_is_not_replaced(storage: Storage, size: int) -> None:
    put(storage, "x", b"1" * size)
    with pytest.raises(StorageError, match="exists already"):
        put(storage, "x", b"2" * size)
    assert storage.read("x") == b"1" * size


def test_an_empty_object_can_be_stored(storage: Storage) -> None:
    put(storage, "x", b"")
    assert (storage.read("x"), storage.size("x"), storage.exists("x")) == (b"", 0, True)


def test_a_read_past_the_end_returns_only_existing_bytes(storage: Storage) -> None:
    put(storage, "x", b"0123456789")
    buffer = memoryview(bytearray(4))
    source = storage.source("x")
    assert source.read_into(3, buffer) == 4
    assert bytes(buffer) == b"3456"
    assert source.read_into(8, buffer) == 2
    assert source.read_into(20, buffer) == 0
    source.close()
    source.close()


def test_an_object_above_the_document_limit_is_not_read_whole(storage: Storage) -> None:
    put(storage, "f/document", b"d" * 1000)
    assert storage.read("f/document") == b"d" * 1000
    put(storage, "f/large", bytes(MAX_DOCUMENT_BYTES + 1))
    with pytest.raises(NotAnObject, match=str(MAX_DOCUMENT_BYTES + 1)):
        storage.read("f/large")
    room = bytearray(10)
    source = storage.source("f/large")
    assert source.read_into(MAX_DOCUMENT_BYTES - 5, memoryview(room)) == 6, "in parts it is"
    source.close()


def test_exactly_one_of_many_concurrent_creates_succeeds(
    storage: Storage, request: pytest.FixtureRequest
) -> None:
    if "rclone" in request.node.name:
        pytest.skip("rclone serve s3 does not honour If-None-Match; Strata says so in its log")
    together, made = threading.Barrier(8), []

    def create(number: int) -> None:
        together.wait(10)
        made.append((storage.create_once("f/once", b"%d" % number), number))

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    (winner,) = [number for first, number in made if first]
    assert storage.read("f/once") == b"%d" % winner
    assert storage.list("f") == ["once"]


def test_create_once_never_replaces_an_existing_object(storage: Storage) -> None:
    assert storage.create_once("f/once", b"1")
    assert not storage.create_once("f/once", b"2")
    assert storage.create_once("f/other", b"3")
    assert not storage.create_once("f/other", b"3")
    assert storage.read("f/once") == b"1"


def test_a_missing_object_raises_on_read_and_may_be_deleted(storage: Storage) -> None:
    for read in (storage.read, storage.size):
        with pytest.raises(ObjectMissing):
            read("no/such")
    with pytest.raises(ObjectMissing):
        storage.source("no/such").read_into(0, memoryview(bytearray(1)))
    storage.delete("no/such")
    storage.delete_folder("no")
    assert storage.list("no") == []


def test_a_folder_is_deleted_only_once_it_is_empty(storage: Storage) -> None:
    put(storage, "f/x", b"1")
    with pytest.raises(StorageError):
        storage.delete_folder("f")
    storage.delete("f/x")
    storage.delete_folder("f")
    assert not storage.exists("f")


def test_a_name_that_leads_out_of_the_storage_is_rejected(storage: Storage) -> None:
    for name in ("", "/etc/passwd", "../x", "a/../../x", "a//b", "a/.", "a\0b"):
        for use in (storage.read, storage.sink, storage.delete, storage.exists, storage.source):
            with pytest.raises(InvalidArgument):
                use(name)


def test_a_hold_on_an_object_lasts_until_its_release(storage: Storage) -> None:
    storage.create_once("claims/1", b"")
    assert not storage.is_held("claims/1")
    assert not storage.is_held("claims/none")
    storage.hold("claims/1")
    assert storage.is_held("claims/1")
    assert storage.list("claims") == ["1"]
    storage.release("claims/1")
    storage.release("claims/1")
    assert not storage.is_held("claims/1")


def test_a_checkpoint_is_saved_listed_restored_and_removed(storage: Storage) -> None:
    catalog = local_catalog(storage)
    first = save(storage, catalog, {"weights": b"1" * LARGE_BYTES}, 1)
    second = save(storage, catalog, {"weights": b"2"}, 2)
    assert [c.step for c in local_catalog(storage, start=9).all()] == [1, 2]
    folder = catalog.folder(first)
    assert MARKER in storage.list(folder)
    assert GLOBAL_NAME in storage.list(folder)
    loaded = load(storage, folder, manifest_digest=first.manifest_digest, rank=0)
    (data,) = loaded.saved.data.values()
    assert bytes(data) == b"1" * LARGE_BYTES
    remove_objects(storage, folder)
    assert [c.step for c in local_catalog(storage).all()] == [2]
    assert not storage.exists(folder)
    if isinstance(storage, S3Storage):
        assert second.path.startswith("s3://")
        assert " " not in second.path, "a URI is percent-encoded"
