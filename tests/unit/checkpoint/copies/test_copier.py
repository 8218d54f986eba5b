"""Failures of a copy to the second storage and their reports: the copier publishes nothing unverified in it."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from strata.checkpoint.copies.copier import Copier
from strata.checkpoint.copies.far_copy import Replica
from strata.checkpoint.copies.tiers import TieredStorage
from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.format.manifest import GLOBAL_NAME
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.format.marker import committed
from strata.checkpoint.restore.reader import load
from strata.checkpoint.storage.sink import ObjectMissing, Storage, put
from strata.errors import CheckpointCorrupt, StorageError, StrataError
from tests.polling import until
from tests.unit.checkpoint.copies.test_tiers import LIMIT_S, STATE, Pair, image_of, of
from tests.unit.checkpoint.memory_storage import MemorySource
from tests.unit.checkpoint.ranks import STEP, Ranks

DEVICE_LOST = OSError("the device is gone")


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.replicator.close()


def until_raised(ask: Callable[[], object]) -> None:
    """Call `ask` repeatedly until it raises, for at most LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ask()
        time.sleep(0.01)


# -- errors that are not a StrataError -----------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("the device is gone"), MemoryError(), KeyError("x")])
@pytest.mark.parametrize(
    ("side", "verb", "name"),
    [("near", "read", ""), ("far", "begin", ""), ("far", "write", ""), ("far", "create", MARKER)],
)
def test_a_failed_copy_is_reported_and_the_next_checkpoint_is_copied(
    pair: Pair, caplog: pytest.LogCaptureFixture, error: Exception, side: str, verb: str, name: str
) -> None:
    first, second = pair.save(1), pair.save(2)
    getattr(pair, side).fail(error, verb, name=f"{first.folder}/{name}")
    pair.replicator.add(first)
    pair.replicator.add(second)
    with pytest.raises(StorageError, match=f"step 1 is not copied.*{type(error).__name__}") as raised:
        pair.replicator.wait(LIMIT_S)
    assert raised.value.__cause__ is error
    assert raised.value.hint
    assert committed(pair.far, second.folder) is not None
    assert committed(pair.far, first.folder) is None
    pair.replicator.wait(LIMIT_S)  # the error is reported once
    assert "step 1 is not copied" in caplog.text


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("missing", OSError("the device is gone")),
        ("afterwards", OSError("the device is gone")),
        ("afterwards", StorageError("the device is gone")),
    ],
)
def test_errors_of_the_callbacks_around_a_copy_are_reported(pair: Pair, what: str, error: Exception) -> None:
    def fail() -> list[Replica]:
        raise error

    replicator = Copier(pair.near, pair.far, rank=0, ranks=1, retry_s=(0.001,), **{what: fail})  # type: ignore[arg-type]  # either
    replica = pair.save(1)
    replicator.add(replica)
    with pytest.raises(StrataError, match="the device is gone"):
        until_raised(lambda: replicator.wait(LIMIT_S))
    assert committed(pair.far, replica.folder) is not None
    replicator.close()


def test_waiting_for_copies_ends_if_no_thread_can_start(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    replica = pair.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        pair.replicator.add(replica)
        with pytest.raises(StorageError, match="no thread can be started"):
            pair.replicator.wait(None)
    pair.replicator.wait(LIMIT_S)


def test_check_raises_copy_errors_without_a_wait(pair: Pair) -> None:
    pair.replicator.check()
    pair.far.fail(DEVICE_LOST, "begin")
    pair.replicator.add(pair.save(1))
    with pytest.raises(StorageError, match="step 1"):
        pair.replicator.wait(LIMIT_S)
    pair.replicator.add(pair.save(2))
    pair.replicator.add(pair.save(3))
    for _step in (1, 2, 3):
        assert pair.turned.acquire(timeout=LIMIT_S)
    with pytest.raises(StorageError, match="step 2") as raised:
        pair.replicator.check()
    assert "step 3" in "".join(raised.value.__notes__)
    pair.replicator.check()


@pytest.mark.parametrize("closed", [True, False])
def test_an_unread_copy_error_is_reported_at_close_or_exit(
    pair: Pair,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    closed: bool,
) -> None:
    at_exit: list[Callable[[], None]] = []
    with monkeypatch.context() as patch:
        patch.setattr(atexit, "register", at_exit.append)
        replicator = pair.start(0)
    pair.far.fail(DEVICE_LOST, "begin")
    replicator.add(pair.save(1))
    assert pair.turned.acquire(timeout=LIMIT_S)
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        for end in [replicator.close] if closed else at_exit:
            end()
    assert "step 1 is not copied" in caplog.text + capsys.readouterr().err


@pytest.mark.parametrize("error", [StorageError("away"), ObjectMissing("no such upload")])
@pytest.mark.parametrize("verb", ["begin", "finish", "create"])
def test_a_far_storage_in_error_is_tried_again(pair: Pair, error: StorageError, verb: str) -> None:
    """A 404 in answer to an upload is a fault of the server; the checkpoint is still in the near storage."""
    replica = pair.save(1)
    pair.far.fail(error, verb, times=3)
    pair.copy(replica)
    assert of(pair.far, replica) == of(pair.near, replica)
    assert committed(pair.far, replica.folder) is not None


def test_an_unreadable_checkpoint_does_not_delay_other_copies(pair: Pair) -> None:
    first, second = pair.save(1), pair.save(2)
    pair.near.fail(StorageError("a sector is bad"), "read", name=image_of(pair.near, first))
    pair.replicator.add(first)
    pair.replicator.add(second)
    with pytest.raises(StorageError, match=r"steps \[1\] .*a sector is bad"):
        pair.replicator.wait(0.5)
    assert committed(pair.far, second.folder) is not None


# -- nothing unproven -------------------------------------------------------------------------


def at_of(pair: Pair, base: Replica, tensor: str) -> int:
    found = load(pair.near, base.folder, manifest_digest=base.manifest_digest, rank=0).saved
    return pair.near.objects[image_of(pair.near, base)].index(bytes(found.data[tensor][:64]))


def test_the_base_of_an_incremental_is_verified_while_it_is_copied(pair: Pair) -> None:
    base, replica = pair.with_incremental()
    pair.near.flip(image_of(pair.near, base), at_of(pair, base, "frozen") + CHUNK_BYTES + 5)
    with pytest.raises(CheckpointCorrupt, match="differs from the saved data"):
        pair.copy(replica)
    assert of(pair.far, replica) == {}


def test_damage_in_unused_base_chunks_does_not_stop_the_copy_of_an_incremental(pair: Pair) -> None:
    base, replica = pair.with_incremental()
    name = image_of(pair.near, base)
    pair.near.flip(name, len(pair.near.objects[name]) - 3)
    pair.copy(replica)
    load(pair.far, replica.folder, manifest_digest=replica.manifest_digest, rank=0)
    with pytest.raises(CheckpointCorrupt, match="differs from the saved data"):
        pair.copy(base)
    assert committed(pair.far, base.folder) is None, "half of it lies there, unproven"


@pytest.mark.parametrize("harm", ["a bit", "cut"])
@pytest.mark.parametrize("which", ["base", "own"])
def test_objects_already_in_the_far_storage_are_verified_before_they_count(
    pair: Pair, which: str, harm: str
) -> None:
    """The copier rewrites no truncated object: uploads leave no partial objects, and names are never replaced."""
    base, replica = pair.with_incremental()
    name = image_of(pair.near, base if which == "base" else replica)
    whole = pair.near.objects[name]
    put(pair.far, name, whole if harm == "a bit" else whole[:-1])
    message = f"memory.* has {len(whole) - 1} bytes instead of {len(whole)}"
    if harm == "a bit":
        pair.far.flip(name, 9 if which == "own" else at_of(pair, base, "frozen") + 5)
        message = "memory.*differs"
    pair.replicator.add(replica)
    with pytest.raises(CheckpointCorrupt, match=message) as raised:
        pair.replicator.wait(LIMIT_S)
    assert "remove the damaged object there" in raised.value.hint
    assert not pair.far.exists(f"{replica.folder}/{MARKER}")
    assert not pair.far.exists(f"{replica.folder}/manifest.json")


def test_objects_that_this_process_verified_are_not_read_back(pair: Pair) -> None:
    base, replica = pair.with_incremental()
    opened, sources = pair.far.source, list[str]()

    def source(name: str) -> MemorySource:
        sources.append(name)
        return opened(name)

    pair.far.source = source  # type: ignore[method-assign]  # counted
    for each in (base, replica):
        pair.copy(each)
    assert committed(pair.far, replica.folder) is not None
    assert sources == []


def test_a_document_that_changes_between_two_reads_is_not_copied(pair: Pair) -> None:
    replica, reads = pair.save(1), iter(range(9))

    def fault(verb: str, name: str) -> None:
        if verb == "read" and name.endswith("rank-00000.json") and next(reads) == 1:
            pair.near.flip(name, 100)

    pair.near.fault = fault
    with pytest.raises(CheckpointCorrupt, match=r"rank-00000\.json differs"):
        pair.copy(replica)
    assert not pair.far.exists(f"{replica.folder}/rank-00000.json")


def test_a_committed_checkpoint_without_a_near_marker_is_copied_and_marked(pair: Pair) -> None:
    """The near marker is missing, but the catalog says that the checkpoint is committed."""
    replica = pair.save(1)
    del pair.near.objects[f"{replica.folder}/{MARKER}"]
    pair.copy(replica)
    assert committed(pair.far, replica.folder) is not None


# -- several ranks ----------------------------------------------------------------------------


def of_two(pair: Pair) -> Replica:
    """Return a checkpoint that two ranks saved to the near storage."""
    ranks = Ranks(2, near=pair.near)
    ranks.save(states=[{"rank": rank, **STATE} for rank in range(2)])
    return ranks.replica


def ranks_of(pair: Pair, world: str, *, near: Storage | None = None, others_s: float = 600.0) -> list[Copier]:
    return [
        Copier(
            near or pair.near,
            pair.far,
            rank=rank,
            ranks=2,
            world=world,
            retry_s=(0.001,),
            poll_s=0.001,
            others_s=others_s,
        )
        for rank in range(2)
    ]


def test_a_rank_that_cannot_copy_its_part_reports_it_to_the_others(pair: Pair) -> None:
    replica, ranks = of_two(pair), ranks_of(pair, "1")
    name = image_of(pair.near, replica, 1)
    whole = pair.near.objects[name]
    pair.near.flip(name, 9)
    for each in ranks:
        each.add(replica)
    with pytest.raises(CheckpointCorrupt, match="rank-00001"):
        ranks[1].wait(LIMIT_S)
    with pytest.raises(StorageError, match=r"rank 1 reports: .*differs"):
        ranks[0].wait(LIMIT_S)
    for each in ranks:
        each.close()
    # an operator puts the object back, and the next processes resume the copy
    pair.near.objects[name] = whole
    ranks = ranks_of(pair, "2")
    for each in ranks:
        each.add(replica)
    for each in ranks:
        each.wait(LIMIT_S)
        each.close()
    assert of(pair.far, replica) == of(pair.near, replica)


def test_a_wait_for_copies_ends_with_an_error_if_another_rank_is_lost(pair: Pair) -> None:
    replica, (first, second) = of_two(pair), ranks_of(pair, "1", others_s=0.05)
    first.add(replica)
    with pytest.raises(StorageError, match=rf"steps \[{STEP}\] .*rank 1"):
        first.wait(None)
    first.check()  # rank 1 may only be slow: no error yet
    second.add(replica)
    second.wait(LIMIT_S)
    first.wait(LIMIT_S)
    for each in (first, second):
        each.close()
    assert of(pair.far, replica) == of(pair.near, replica)
    pair.far.objects.clear()
    pair.copy(replica)
    assert of(pair.far, replica) == of(pair.near, replica), "a smaller world copies what the larger one left"


def test_a_checkpoint_deleted_by_retention_during_its_copy_is_not_a_failure(pair: Pair) -> None:
    replica, both = of_two(pair), TieredStorage(pair.near, pair.far)
    ranks = ranks_of(pair, "1", near=both, others_s=1.0)
    ranks[0].add(replica)
    until(lambda: pair.far.exists(f"{replica.folder}/{GLOBAL_NAME}"))
    for name in [name for name in pair.near.objects if name.startswith(replica.folder)]:
        del pair.near.objects[name]
    ranks[1].add(replica)
    for each in ranks:
        each.wait(LIMIT_S)
        each.close()
    assert not any("not-copied" in name for name in pair.far.objects)
