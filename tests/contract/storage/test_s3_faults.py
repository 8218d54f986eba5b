"""Faults of an S3 server and of the connection to it, and how a save handles them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

import pytest

from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.restore.reader import load
from strata.checkpoint.storage.s3_storage import HOLD_S, SWEEP_S, S3Storage
from strata.checkpoint.storage.s3_upload import (
    PARTS_AIMED_AT,
    PARTS_AT_ONCE,
    SINGLE_BYTES,
    S3Sink,
    part_bytes,
)
from strata.checkpoint.storage.sink import ObjectMissing, put
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointCorrupt, ConfigError, StorageError
from tests.contract.storage.conftest import s3_storage
from tests.storage.s3_stub import CODES, StubS3, serving
from tests.unit.checkpoint.saves import local_catalog, save

LARGE = bytes(range(256)) * (CHUNK_BYTES // 256 + 400) + b"tail"
"""Data that takes two parts of an upload."""


@pytest.fixture
def storage(stub: StubS3) -> S3Storage:
    return s3_storage(stub.url)


def stored(stub: StubS3, name: str) -> bytes:
    return stub.objects[f"checkpoints/run 1/{name}"].data


# -- small objects ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503])
def test_a_request_is_retried_after_a_server_error(storage: S3Storage, stub: StubS3, status: int) -> None:
    stub.fail("put", status=status, times=2)
    put(storage, "x", b"1")
    stub.fail("get", status=status, times=2)
    assert storage.read("x") == b"1"


def test_a_lasting_server_error_is_raised_with_its_status(storage: S3Storage, stub: StubS3) -> None:
    stub.fail("put", status=500, times=99)
    with pytest.raises(StorageError, match="InternalError \\(500\\)") as error:
        put(storage, "x", b"1")
    assert "repeated" in error.value.hint


def test_a_conflict_is_tried_again_later(storage: S3Storage, stub: StubS3) -> None:
    put(storage, "first", b"")
    stub.fail("put", status=409, times=2)
    assert storage.create_once("x", b"1")
    stub.fail("put", status=409, times=99)
    with pytest.raises(StorageError, match="ConditionalRequestConflict"):
        storage.create_once("y", b"1")


@pytest.mark.parametrize("already", [False, True])
def test_a_412_after_a_lost_response_counts_as_success(
    storage: S3Storage, stub: StubS3, already: bool
) -> None:
    if already:
        put(storage, "first", b"")
    stub.fail("put", how="lost")
    assert storage.create_once("x", b"1")
    assert stored(stub, "x") == b"1"
    stub.fail("put", how="lost")
    put(storage, "y", b"2")
    assert stored(stub, "y") == b"2"


def test_a_412_for_another_writers_object_is_no_success(storage: S3Storage, stub: StubS3) -> None:
    assert storage.create_once("x", b"same")
    assert not s3_storage(stub.url).create_once("x", b"same")


def test_a_server_without_conditional_writes_is_logged_and_nothing_is_overwritten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(StubS3(conditions=False)) as stub:
        storage = s3_storage(stub.url)
        with caplog.at_level(logging.WARNING):
            assert storage.create_once("x", b"1")
        assert "does not honour If-None-Match" in caplog.text
        assert not storage.create_once("x", b"2")
        assert stored(stub, "x") == b"1"
        assert not s3_storage(stub.url).create_once("x", b"3")
        assert stored(stub, "x") == b"1"
        assert storage.create_once("y", b"4")


def test_conditions_are_dropped_for_a_server_that_rejects_them(stub: StubS3) -> None:
    stub.fail("put", status=501)
    storage = s3_storage(stub.url)
    assert storage.create_once("x", b"1")
    assert not storage.create_once("x", b"2")


def test_a_torn_answer_is_read_again(storage: S3Storage, stub: StubS3) -> None:
    put(storage, "x", b"1234")
    stub.fail("get", how="torn", times=2)
    assert storage.read("x") == b"1234"


# -- permissions and addresses ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda s: s.read("x"), "get"),
        (lambda s: s.size("x"), "head"),
        (lambda s: s.list(), "list"),
        (lambda s: s.delete("x"), "delete"),
        (lambda s: put(s, "y", b""), "put"),
        (lambda s: put(s, "y", LARGE), "create"),
        (lambda s: put(s, "y", LARGE), "part"),
        (lambda s: s.source("x").read_into(0, memoryview(bytearray(1))), "get"),
    ],
)
def test_a_403_error_names_the_permissions_that_the_credentials_need(
    storage: S3Storage, stub: StubS3, act: Callable[[S3Storage], object], kind: str
) -> None:
    put(storage, "x", b"1")
    stub.fail(kind, status=403, times=99)
    with pytest.raises(StorageError, match="403") as error:
        act(storage)
    assert "read, write, list and delete" in error.value.hint


def test_a_missing_bucket_is_a_storage_error_not_a_missing_object(stub: StubS3) -> None:
    storage = s3_storage(stub.url, bucket="other")
    for act in (lambda: storage.read("x"), storage.list, lambda: put(storage, "x", b"1")):
        with pytest.raises(StorageError, match="NoSuchBucket") as error:
            act()
        assert type(error.value).code == "STORAGE"
        assert "create the bucket" in error.value.hint


def test_an_unreachable_server_raises_an_error_with_a_hint() -> None:
    with serving(StubS3()) as stub:
        url = stub.url
    storage = s3_storage(url, attempts=2)
    for act in (lambda: storage.read("x"), lambda: storage.create_once("x", b"")):
        with pytest.raises(StorageError, match="cannot") as error:
            act()
        assert "endpoint_url" in error.value.hint


def test_a_server_that_never_answers_is_given_up(stub: StubS3) -> None:
    storage = s3_storage(stub.url, attempts=1, answer_s=0.3)
    fault = stub.fail("get", how="slow", times=9)
    fault.until = threading.Event()
    try:
        with pytest.raises(StorageError, match=r"[Tt]imed out|timeout"):
            storage.read("x")
    finally:
        fault.until.set()


def test_missing_credentials_are_an_error_with_a_hint(stub: StubS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="no credentials") as error:
        s3_storage(stub.url)
    assert "AWS_PROFILE" in error.value.hint


# -- large objects ----------------------------------------------------------------------------


def test_parts_are_whole_chunks_and_about_a_thousand_at_most() -> None:
    assert part_bytes(1) == part_bytes(PARTS_AIMED_AT * CHUNK_BYTES) == CHUNK_BYTES
    assert part_bytes(PARTS_AIMED_AT * CHUNK_BYTES + 1) == 2 * CHUNK_BYTES
    for size in (1 << 30, 1 << 40, 5 << 40):
        assert part_bytes(size) % CHUNK_BYTES == 0
        assert -(-size // part_bytes(size)) <= PARTS_AIMED_AT


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("create", {"status": 500}),
        ("part", {"status": 500}),
        ("part", {"status": 503, "times": 2}),
        ("part", {"how": "torn"}),
        ("part", {"how": "lost"}),
        ("complete", {"status": 500}),
        ("complete", {"how": "lost"}),
        ("create", {"how": "lost"}),
    ],
)
def test_an_upload_survives_transient_faults(
    storage: S3Storage, stub: StubS3, kind: str, fault: dict[str, object]
) -> None:
    stub.fail(kind, key="f/x", **fault)  # type: ignore[arg-type]  # named in the table
    put(storage, "f/x", LARGE)
    assert stored(stub, "f/x") == LARGE


@pytest.mark.parametrize("kind", ["create", "part", "complete"])
def test_an_upload_that_fails_leaves_nothing(storage: S3Storage, stub: StubS3, kind: str) -> None:
    stub.fail(kind, status=500, times=999, key="f/x")
    with pytest.raises(StorageError, match="500"):
        put(storage, "f/x", LARGE)
    assert stub.objects == {}
    assert stub.uploads == {}


@pytest.mark.parametrize("status", [400, 403, 409, 412])
@pytest.mark.parametrize("kind", ["create", "part", "complete"])
def test_a_refused_upload_names_its_object_and_status_and_leaves_nothing(
    storage: S3Storage, stub: StubS3, kind: str, status: int
) -> None:
    stub.fail(kind, status=status, times=999, key="f/x")
    with pytest.raises(StorageError, match=f"f/x.*({status}|{CODES[status]})") as error:
        put(storage, "f/x", LARGE)
    assert not isinstance(error.value, ObjectMissing)
    assert (stub.objects, stub.uploads) == ({}, {})


@pytest.mark.parametrize("kind", ["create", "part", "complete", "head"])
def test_a_404_during_an_upload_is_not_a_missing_object(storage: S3Storage, stub: StubS3, kind: str) -> None:
    """For example, a lifecycle rule aborted the upload: the upload is missing, and no object that a caller reads."""
    put(storage, "first", b"")
    looked = stub.count("head")
    sink = storage.sink("f/x")
    sink.begin(len(LARGE))
    assert stub.count("head") == looked + 1
    stub.fail(kind, status=404, code="NoSuchUpload", times=999, key="f/x")
    with pytest.raises(StorageError) as error:
        finish(sink)
    assert not isinstance(error.value, ObjectMissing)
    sink.abort()


def finish(sink: S3Sink) -> None:
    for start in range(0, len(LARGE), CHUNK_BYTES):
        sink.write_at(start, LARGE[start : start + CHUNK_BYTES])
    sink.finish()


@pytest.mark.parametrize("kind", ["create", "part", "complete"])
def test_an_upload_that_is_never_answered_is_given_up(stub: StubS3, kind: str) -> None:
    storage = s3_storage(stub.url, attempts=2, answer_s=0.1)
    fault = stub.fail(kind, how="slow", times=99, key="f/x")
    fault.until = threading.Event()
    try:
        with pytest.raises(StorageError, match="f/x") as error:
            put(storage, "f/x", LARGE)
        assert error.value.hint
    finally:
        fault.until.set()


def test_a_failed_upload_does_not_claim_another_writers_object(storage: S3Storage, stub: StubS3) -> None:
    sink = storage.sink("f/x")
    sink.begin(len(LARGE))
    sink.write_at(0, LARGE)
    put(s3_storage(stub.url), "f/x", b"theirs")  # the object does not appear before `finish`
    stub.fail("complete", status=403)
    with pytest.raises(StorageError, match="403"):
        sink.finish()
    sink.abort()
    assert stored(stub, "f/x") == b"theirs"


def test_a_given_up_upload_is_aborted(storage: S3Storage, stub: StubS3) -> None:
    sink = storage.sink("f/x")
    sink.begin(len(LARGE))
    sink.write_at(0, LARGE[:CHUNK_BYTES])
    sink.write_at(CHUNK_BYTES, LARGE[CHUNK_BYTES:])
    sink.abort()
    assert (stub.objects, stub.uploads) == ({}, {})


def test_the_error_of_a_failed_upload_is_raised_by_a_later_write(storage: S3Storage, stub: StubS3) -> None:
    stub.fail("create", status=403, key="f/x")
    sink = storage.sink("f/x")
    sink.begin(len(LARGE))

    def write() -> None:
        for start in range(0, len(LARGE), 1 << 10):
            sink.write_at(start, LARGE[start : start + (1 << 10)])
        sink.finish()

    with pytest.raises(StorageError, match="403"):
        write()
    sink.abort()


def test_a_writable_block_is_copied_and_may_be_reused_at_once(storage: S3Storage, stub: StubS3) -> None:
    sink = storage.sink("f/x")
    sink.begin(len(LARGE))
    mine = bytearray(LARGE[CHUNK_BYTES:])
    sink.write_at(CHUNK_BYTES, mine)
    mine[:] = bytes(len(mine))  # a writable block was copied
    sink.write_at(0, LARGE[:CHUNK_BYTES])
    assert stub.objects == {}
    sink.finish()
    sink.abort()
    assert stored(stub, "f/x") == LARGE
    assert stub.uploads == {}


class Chunk(bytearray):
    """Memory whose release can be observed."""


def test_an_upload_keeps_only_chunks_in_flight(storage: S3Storage, stub: StubS3) -> None:
    """A copy to remote storage reads each chunk into new memory; kept chunks would add up to the image."""
    count = 2 * PARTS_AT_ONCE
    sink = storage.sink("f/x")
    sink.begin(count * CHUNK_BYTES)
    kept: list[weakref.ref[Chunk]] = []
    most = 0
    for number in (0, 2, 1, *range(3, count)):
        chunk = Chunk(bytes([number]) * CHUNK_BYTES)
        kept.append(weakref.ref(chunk))
        sink.write_at(number * CHUNK_BYTES, memoryview(chunk).toreadonly())
        del chunk
        most = max(most, sum(each() is not None for each in kept))
    assert most <= PARTS_AT_ONCE + 4
    sink.finish()
    assert stored(stub, "f/x") == b"".join(bytes([number]) * CHUNK_BYTES for number in range(count))


def test_an_interrupted_upload_raises_keyboard_interrupt_and_no_storage_error(
    storage: S3Storage, stub: StubS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = storage.sink("f/x")
    sink.begin(len(LARGE))
    sink.write_at(0, LARGE)

    def interrupted(key: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage._control, "find", interrupted)  # Ctrl-C while a request is under way
    with pytest.raises(KeyboardInterrupt):
        sink.finish()
    sink.abort()


# -- what crashes leave -----------------------------------------------------------------------


def leave_an_upload(storage: S3Storage, stub: StubS3, name: str) -> None:
    """Leave an incomplete upload, as a process does if it dies in the middle of an upload."""
    client = storage._control._client  # the storage's own methods never leave an upload behind
    client.create_multipart_upload(Bucket=stub.bucket, Key=f"checkpoints/run 1/{name}")


def test_deleting_a_folder_aborts_its_incomplete_uploads(storage: S3Storage, stub: StubS3) -> None:
    leave_an_upload(storage, stub, "f/x")
    leave_an_upload(storage, stub, "other/x")
    storage.delete_folder("f")
    assert [u.key for u in stub.uploads.values()] == ["checkpoints/run 1/other/x"]


def test_old_incomplete_uploads_are_swept_with_the_first_write(storage: S3Storage, stub: StubS3) -> None:
    leave_an_upload(storage, stub, "f/old")
    stub.ahead_s = SWEEP_S + 10
    leave_an_upload(storage, stub, "f/young")
    put(storage, "x", b"")
    assert [u.key for u in stub.uploads.values()] == ["checkpoints/run 1/f/young"]


def test_a_server_that_cannot_list_uploads_still_serves_writes_and_deletes(
    storage: S3Storage, stub: StubS3
) -> None:
    stub.fail("uploads", status=501, times=99)
    put(storage, "x", b"1")
    put(storage, "y", LARGE)
    storage.delete_folder("f")


def test_a_hold_that_is_not_renewed_expires_for_other_processes(storage: S3Storage, stub: StubS3) -> None:
    storage.create_once("claims/1", b"")
    storage.hold("claims/1")
    other = s3_storage(stub.url)
    assert other.is_held("claims/1")
    stub.ahead_s = HOLD_S + 10
    assert not other.is_held("claims/1")
    assert storage.is_held("claims/1"), "whoever holds it knows"


# -- whole checkpoints ------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_one_before_as_the_latest(storage: S3Storage, stub: StubS3) -> None:
    catalog = local_catalog(storage)
    save(storage, catalog, {"weights": LARGE}, 1)
    stub.fail("complete", status=500, times=999)
    with pytest.raises(StorageError):
        save(storage, catalog, {"weights": LARGE}, 2)
    found = local_catalog(storage).all()
    assert [(c.step, c.state) for c in found] == [(1, CheckpointState.COMMITTED)]


def test_a_flipped_bit_in_the_bucket_is_found(storage: S3Storage, stub: StubS3) -> None:
    catalog = local_catalog(storage)
    saved = save(storage, catalog, {"weights": LARGE}, 1)
    image = next(o for key, o in stub.objects.items() if key.endswith(".safetensors"))
    whole = image.data
    for at in (0, 5000, CHUNK_BYTES + 9, -1):
        data = bytearray(whole)
        data[at] ^= 4
        image.data = bytes(data)
        with pytest.raises(CheckpointCorrupt):
            load(storage, catalog.folder(saved), manifest_digest=saved.manifest_digest, rank=0)


def test_a_truncated_or_missing_image_is_corrupt(storage: S3Storage, stub: StubS3) -> None:
    catalog = local_catalog(storage)
    saved = save(storage, catalog, {"weights": LARGE}, 1)
    key, image = next((k, o) for k, o in stub.objects.items() if k.endswith(".safetensors"))
    image.data = image.data[:-1]
    assert [c.state for c in local_catalog(storage).all()] == [CheckpointState.CORRUPT]
    del stub.objects[key]
    with pytest.raises(CheckpointCorrupt, match="missing"):
        load(storage, catalog.folder(saved), manifest_digest=saved.manifest_digest, rank=0)


def test_a_torn_range_is_read_again(storage: S3Storage, stub: StubS3) -> None:
    catalog = local_catalog(storage)
    saved = save(storage, catalog, {"weights": LARGE}, 1)
    stub.fail("get", how="torn", key=".safetensors", times=2)
    loaded = load(storage, catalog.folder(saved), manifest_digest=saved.manifest_digest, rank=0)
    assert [bytes(data) for data in loaded.saved.data.values()] == [LARGE]


def test_a_retried_upload_replaces_its_first_try_even_if_that_was_complete(
    storage: S3Storage, stub: StubS3
) -> None:
    """The first try may be complete without the process knowing: its answer was lost, and then the server went away."""
    data = bytes(SINGLE_BYTES + 1)
    sink = storage.sink("x")
    sink.begin(len(data))
    sink.write_at(0, data)
    away = [stub.fail("complete", how="lost", times=99), stub.fail("head", status=503, times=999)]
    away.append(stub.fail("uploads", status=503, times=999))
    with pytest.raises(StorageError):
        sink.finish()
    sink.abort()
    assert stored(stub, "x") == data, "it is there, and this process could not learn that"
    for fault in away:
        fault.times = 0
    put(storage, "x", data[:-1] + b"2")
    assert stored(stub, "x")[-1:] == b"2"
    assert stub.uploads == {}
    with pytest.raises(StorageError, match="exists already"):
        put(storage, "x", data)


def test_a_retried_upload_does_not_replace_another_writers_object(storage: S3Storage, stub: StubS3) -> None:
    fault = stub.fail("put", status=503, times=99, key="x")
    with pytest.raises(StorageError) as caught:
        put(storage, "x", b"1")
    assert caught.value.transient == "storage answers 503"
    fault.times = 0
    put(s3_storage(stub.url), "x", b"2")
    with pytest.raises(StorageError, match="exists already"):
        put(storage, "x", b"1")
    assert stored(stub, "x") == b"2"
