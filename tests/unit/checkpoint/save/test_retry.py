"""Saves that the storage refuses for a while are held, retried from the start, and ended when no longer needed."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from strata.checkpoint.catalog.protocol import SaveRequest
from strata.checkpoint.copies.tiers import FarUnreachable, as_far_error
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.format.marker import committed, read_manifest, write_marker
from strata.checkpoint.save.retry import PAUSES_S, HoldOver, SaveRetry
from strata.checkpoint.save.saver import DROPPED, Saver
from strata.checkpoint.storage.local_file import as_storage_error
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.s3_errors import storage_error
from strata.checkpoint.storage.sink import put
from strata.core.kv.records import CheckpointState
from strata.core.stop.save_hold import SaveHold
from strata.errors import CheckpointAborted, StorageError
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.ranks import LIMIT_S, Ranks
from tests.unit.checkpoint.saves import an_info, local_catalog, snapshot_of

QUICK_S = (0.01,)


def full() -> StorageError:
    return StorageError("cannot write x: No space left on device", transient="disk full")


# -- errors that are retried ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "transient"),
    [
        (errno.ENOSPC, "disk full"),
        (errno.EDQUOT, "disk quota used up"),
        (errno.EIO, "device error"),
        (errno.ESTALE, "stale file handle"),
        (errno.ETIMEDOUT, "storage does not answer"),
        (errno.EACCES, ""),
        (errno.EPERM, ""),
        (errno.EROFS, ""),
        (errno.ENOTDIR, ""),
        (errno.ENAMETOOLONG, ""),
    ],
)
def test_only_file_system_errors_that_may_pass_are_transient(number: int, transient: str) -> None:
    with pytest.raises(StorageError) as caught, as_storage_error("write", Path("/x")):
        raise OSError(number, os.strerror(number))
    assert caught.value.transient == transient


@pytest.mark.parametrize(
    ("code", "status", "transient"),
    [
        ("SlowDown", 503, "storage answers 503"),
        ("", 503, "storage answers 503"),
        ("InternalError", 500, "storage answers 500"),
        ("", 502, "storage answers 502"),
        ("", 504, "storage answers 504"),
        ("", 429, "storage answers 429"),
        ("RequestTimeout", 400, "storage answers RequestTimeout"),
        ("AccessDenied", 403, ""),
        ("ExpiredToken", 400, ""),
        ("NoSuchBucket", 404, ""),
        ("NotImplemented", 501, ""),
        ("InvalidRequest", 400, ""),
        ("PreconditionFailed", 412, ""),
        ("PermanentRedirect", 301, ""),
    ],
)
def test_only_object_storage_errors_of_overload_are_transient(code: str, status: int, transient: str) -> None:
    assert storage_error("write", "s3://b/x", code, status).transient == transient


@pytest.mark.parametrize(
    ("code", "status", "lasting"),
    [
        ("NoSuchBucket", 404, True),
        ("InvalidAccessKeyId", 403, True),
        ("SignatureDoesNotMatch", 403, True),
        ("AccessDenied", 403, True),
        ("PermanentRedirect", 301, True),
        ("TemporaryRedirect", 307, False),
        ("ExpiredToken", 400, False),
        ("RequestTimeTooSkewed", 403, False),
        ("SlowDown", 503, False),
        ("InvalidRequest", 400, False),
        ("NoSuchKey", 404, False),
    ],
)
def test_only_object_storage_errors_that_a_restart_repeats_are_lasting(
    code: str, status: int, lasting: bool
) -> None:
    assert storage_error("read", "s3://b/x", code, status).lasting is lasting


@pytest.mark.parametrize(
    ("number", "lasting"),
    [(errno.EACCES, True), (errno.EROFS, True), (errno.ENOSPC, False), (errno.EMFILE, False)],
)
def test_only_a_folder_without_write_permission_is_a_lasting_error(number: int, lasting: bool) -> None:
    with pytest.raises(StorageError) as caught, as_storage_error("write", Path("/x")):
        raise OSError(number, os.strerror(number))
    assert caught.value.lasting is lasting


def test_a_far_storage_error_keeps_its_transient_reason() -> None:
    with pytest.raises(FarUnreachable) as caught, as_far_error():
        raise full()
    assert caught.value.transient == "disk full"


# -- retries of one object --------------------------------------------------------------------


class Refusing:
    """An act that raises `errors` one by one, then succeeds."""

    def __init__(self, *errors: StorageError) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


class Clock:
    """A clock that only pauses advance."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.reported: list[SaveHold | None] = []
        self.retry = SaveRetry(grace_s=100.0, tell=self.reported.append, now=lambda: self.now_s)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    def first(self, *acts: Callable[[], int]) -> int:
        return self.retry.first(acts, step=20, pause=self.pause)


def test_retries_back_off_and_report_each_reason_once() -> None:
    clock, other = Clock(), StorageError("x", transient="device error")
    assert clock.first(Refusing(*(full() for _ in range(5)), other, full())) == 7
    assert clock.pauses == [*PAUSES_S, PAUSES_S[-1]]
    reasons = ["disk full", "device error", "disk full"]
    assert [(h.step, h.reason) if h else None for h in clock.reported] == [
        *((20, why) for why in reasons),
        None,
    ]
    assert clock.retry.hold is None


@pytest.mark.parametrize("errors", [(StorageError("denied"),), (full(), StorageError("denied"))])
def test_a_non_transient_error_is_raised_at_once(errors: tuple[StorageError, ...]) -> None:
    clock, act = Clock(), Refusing(*errors)
    with pytest.raises(StorageError, match="denied"):
        clock.first(act)
    assert act.calls == len(errors)
    assert clock.retry.hold is None


def test_after_the_grace_a_save_fails_or_its_handler_takes_over() -> None:
    clock = Clock()
    with pytest.raises(StorageError, match="No space left"):
        clock.first(Refusing(*(full() for _ in range(99))))
    assert clock.now_s == 100.0, "the last pause ends with the grace"
    over: list[str] = []
    clock.retry.committed(10)
    clock.retry.on_over = over.append
    with pytest.raises(HoldOver):
        clock.first(Refusing(*(full() for _ in range(99))))
    assert over[0].startswith("no checkpoint since step 10, 100 s: disk full on host ")
    assert clock.reported[-1] is None


def test_the_grace_counts_from_the_first_refusal_since_the_newest_commit() -> None:
    """One object's success does not reset the grace: a storage that accepts some objects may never complete a save."""
    clock = Clock()
    clock.retry.on_over = lambda why: None
    for seconds in (90.0, 5.0):
        began_s = clock.now_s

        def until(end_s: float = began_s + seconds) -> int:
            if clock.now_s < end_s:
                raise full()
            return 7

        assert clock.first(until) == 7
    assert [hold.held_s for hold in clock.reported if hold] == [0.0, 90.0], (
        "and how long it is does not begin anew"
    )
    with pytest.raises(HoldOver):
        clock.first(Refusing(*(full() for _ in range(99))))
    assert clock.now_s == 100.0
    with pytest.raises(HoldOver):
        clock.first(Refusing(full()))
    assert clock.now_s == 100.0, "nor has another save in flight a grace of its own"

    clock.retry.committed(20)
    began_s = clock.now_s
    with pytest.raises(HoldOver):
        clock.first(Refusing(*(full() for _ in range(99))))
    assert clock.now_s == began_s + 100.0


def test_a_refusal_long_after_the_last_one_has_a_grace_of_its_own() -> None:
    """For example, its save was cancelled, and the next one is an hour later."""
    clock = Clock()
    clock.first(Refusing(full()))
    clock.now_s += 3600.0
    assert clock.first(Refusing(*(full() for _ in range(5)))) == 7


def test_tries_that_take_longer_than_the_grace_end_with_it() -> None:
    clock = Clock()

    def slow() -> int:
        clock.now_s += 150.0
        raise full()

    with pytest.raises(StorageError, match="No space left"):
        clock.first(slow)
    assert clock.now_s < 1000


def test_without_a_grace_no_save_is_held() -> None:
    clock = Clock()
    clock.retry.grace_s = 0.0
    with pytest.raises(StorageError):
        clock.first(Refusing(full()))
    assert (clock.reported, clock.pauses) == ([], [])


@pytest.mark.parametrize(
    ("refusals", "of_far", "calls"),
    [(99, [full(), full()], (3, 3)), (1, [StorageError("denied")], (2, 1))],
    ids=["it takes it in the end", "it never will"],
)
def test_each_retry_tries_the_second_tier_and_the_first_tiers_reason_counts(
    refusals: int, of_far: list[StorageError], calls: tuple[int, int]
) -> None:
    clock, near, far = Clock(), Refusing(*(full() for _ in range(refusals))), Refusing(*of_far)
    assert clock.first(near, far) == 7
    assert (near.calls, far.calls) == calls


# -- whole saves ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", ["rank-00001.safetensors", "rank-00001.json", "manifest.json", "rank-00000.safetensors"]
)
def test_a_part_that_is_refused_for_a_while_is_committed_within_the_same_attempt(file: str) -> None:
    ranks = Ranks(2, grace_s=LIMIT_S)
    ranks.near.fail(full(), "finish", "create", name=file)
    ranks.begin(timeout_s=0.2)  # the other ranks wait for longer: they know that a part is held
    assert ranks.held.wait(LIMIT_S)
    time.sleep(0.5)  # longer than `timeout_s`
    ranks.near.heal()
    ranks.end()
    assert ranks.states() == [CheckpointState.COMMITTED] * 2
    assert committed(ranks.near, ranks.folder) is not None
    assert all(info.bytes_written == info.bytes_total for info in ranks.infos), "each try begins anew"


@pytest.mark.parametrize("taken_over", [True, False])
def test_a_save_held_past_the_grace_is_dropped_with_a_handler_and_fails_without(
    taken_over: bool,
) -> None:
    ranks, reasons = Ranks(2, grace_s=0.1), list[str]()
    ranks.retries[1].on_over = reasons.append if taken_over else None
    ranks.near.fail(full(), "finish", "create", name="rank-00001.safetensors")
    ranks.save()
    assert isinstance(ranks.ends[0], CheckpointAborted)
    assert isinstance(ranks.ends[1], HoldOver) is taken_over
    assert ranks.infos[0].dropped is taken_over, "then it is no failure of the others' saves either"
    assert ranks.record.reason.startswith(DROPPED) is taken_over
    assert ("disk full" in reasons[0]) if taken_over else ("No space left" in str(ranks.ends[1]))


@pytest.mark.parametrize("who", ["this rank cancels", "another rank gives up"])
def test_a_hold_ends_when_its_save_is_cancelled_or_aborted(who: str) -> None:
    ranks = Ranks(2, grace_s=LIMIT_S)
    ranks.near.fail(full(), "finish", "create", name="rank-00001.safetensors")
    ranks.begin()
    assert ranks.held.wait(LIMIT_S)
    if who == "this rank cancels":
        ranks.infos[1].cancel()
    else:
        ranks.catalogs[0].abort(ranks.record, "rank 0: it has no memory left")
    ranks.end()
    assert all(isinstance(end, CheckpointAborted) for end in ranks.ends.values())
    assert ranks.retries[1].hold is None
    assert ranks.infos[0].dropped == (who == "this rank cancels")


@pytest.mark.parametrize("parts", [("rank-00001.safetensors", "rank-00000.json"), ("",)], ids=["some", "all"])
def test_parts_that_the_near_storage_refuses_go_to_the_far_one_and_are_read_from_there(
    parts: tuple[str, ...],
) -> None:
    """The far storage gets the marker if it has all parts."""
    far = MemoryStorage()
    ranks = Ranks(2, far=far, grace_s=LIMIT_S)
    ranks.near.fail(full(), "finish", "create", name=parts)
    ranks.save()
    assert ranks.states() == [CheckpointState.COMMITTED] * 2
    assert committed(ranks.storage, ranks.folder) is not None
    if parts == ("",):
        assert committed(far, ranks.folder) is not None
    else:
        assert {name.rpartition("/")[2] for name in far.objects} == set(parts)
        assert f"{ranks.folder}/{MARKER}" in ranks.near.objects


@pytest.mark.parametrize("two", [False, True])
def test_a_marker_refused_after_the_commit_does_not_hold_the_save(
    two: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The record shows the save as committed; the process that restores the save writes the marker."""
    far = MemoryStorage() if two else None
    ranks = Ranks(2, far=far, grace_s=LIMIT_S)
    ranks.near.fail(full(), "finish", "create", name=MARKER)
    ranks.save()
    assert ranks.states() == [CheckpointState.COMMITTED] * 2
    assert "step 20 is committed, and has no marker until it is restored: cannot write" in caplog.text
    assert [retry.hold for retry in ranks.retries] == [None] * 2
    assert not any(
        name.endswith(MARKER) for storage in (ranks.near, far) if storage for name in storage.objects
    )


def test_a_marker_that_is_refused_for_good_fails_the_save() -> None:
    ranks = Ranks(1, grace_s=LIMIT_S)
    ranks.near.fail(StorageError("denied"), "finish", "create", name=MARKER)
    ranks.save()
    assert isinstance(ranks.ends[0], StorageError)


def test_a_full_disk_does_not_rewrite_an_existing_marker(tmp_path: Path) -> None:
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    saver = Saver(storage=storage, catalog=catalog, commit_timeout_s=5)
    record = saver.save(snapshot_of({"w": 1}), SaveRequest(step=20), an_info(20))
    folder = catalog.folder(record)
    storage.fail(full(), "create", "finish")
    manifest = read_manifest(storage, folder, record.manifest_digest)
    write_marker(storage, folder, manifest, record.manifest_digest)
    del storage.objects[f"{folder}/{MARKER}"]
    with pytest.raises(StorageError, match="No space left"):
        write_marker(storage, folder, manifest, record.manifest_digest)


def test_a_standalone_save_is_held_even_at_its_begin(tmp_path: Path) -> None:
    """The catalog of a standalone process is in the storage, so even the begin may be refused."""
    storage = MemoryStorage()
    storage.fail(full(), "create", "finish", times=12)
    catalog = local_catalog(storage)
    retry = SaveRetry(grace_s=LIMIT_S, pauses_s=QUICK_S)
    saver = Saver(storage=storage, catalog=catalog, commit_timeout_s=5, retry=retry)
    saved = saver.save(snapshot_of({"w": 1}), SaveRequest(step=20), an_info(20))
    assert (saved.state, retry.committed_step) == (CheckpointState.COMMITTED, 20)
    assert [c.step for c in local_catalog(storage).all()] == [20]


def test_a_file_whose_name_is_not_durable_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strata.checkpoint.storage import local_file  # noqa: PLC0415  # the module is patched

    storage = LocalStorage(tmp_path, nonce=iter("abcdef").__next__)
    put(storage, "before", b"0")
    sync, errors = local_file.sync_folder, [OSError(errno.EIO, os.strerror(errno.EIO))]

    def fails(path: Path) -> None:
        if errors:
            raise errors.pop()
        sync(path)

    monkeypatch.setattr(local_file, "sync_folder", fails)
    with pytest.raises(StorageError) as caught:
        put(storage, "x", b"1")
    assert caught.value.transient == "device error"
    assert storage.list() == ["before"]
    put(storage, "x", b"1")
    assert storage.read("x") == b"1"
