"""A near and a far storage, and the replicator that copies checkpoints from the near to the far storage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import CheckpointMetadata, SaveRequest
from strata.checkpoint.copies.copier import Copier
from strata.checkpoint.copies.far_copy import Replica
from strata.checkpoint.copies.tiers import TieredStorage
from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.format.marker import committed
from strata.checkpoint.restore.reader import load
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.storage.sink import ObjectMissing, put
from strata.client.checkpoints.retention import retain
from strata.core.checkpoints.references import Keep
from strata.core.kv.records import CheckpointType
from strata.errors import CheckpointCorrupt, StorageError
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import an_info, local_catalog, save, snapshot_of

LIMIT_S = 20
STATE = {"weights": bytes(range(256)) * 40_000, "step": 1}
FROZEN = {"frozen": bytes(range(256)) * (2 * CHUNK_BYTES // 256)}


class Pair:
    """Two storages, the catalog over both, and a replicator without pauses."""

    def __init__(self) -> None:
        self.near, self.far = MemoryStorage(), MemoryStorage()
        self.both = TieredStorage(self.near, self.far)
        self.catalog = local_catalog(self.both)
        self.turned = threading.Semaphore(0)
        """Released after each turn of a replicator: one checkpoint, copied or not."""
        self.replicator = self.start(0)

    def start(self, rank: int, missing: Callable[[], list[Replica]] = list, *, ranks: int = 1) -> Copier:
        return Copier(
            self.near,
            self.far,
            rank=rank,
            ranks=ranks,
            missing=missing,
            afterwards=self.turned.release,
            retry_s=(0.001,),
            poll_s=0.001,
        )

    def with_incremental(self) -> tuple[Replica, Replica]:
        """Save a base of three chunks, and an Incremental that uses the first two of them."""
        state = {**FROZEN, "step": bytes(CHUNK_BYTES)}
        base = save(self.both, self.catalog, state, 1)
        saver = Saver(storage=self.both, catalog=self.catalog, commit_timeout_s=5)
        request = SaveRequest(step=2, type=CheckpointType.INCREMENTAL)
        saved = saver.save(snapshot_of({**state, "step": b"2" * CHUNK_BYTES}), request, an_info(2))
        assert saved.checkpoint_type is CheckpointType.INCREMENTAL
        return replica_of(self.catalog, base), replica_of(self.catalog, saved)

    def copy(self, *replicas: Replica) -> None:
        for replica in replicas:
            self.replicator.add(replica)
        self.replicator.wait(LIMIT_S)

    def save(self, step: int) -> Replica:
        return replica_of(self.catalog, save(self.both, self.catalog, STATE, step))

    def replicate(self, step: int) -> Replica:
        replica = self.save(step)
        self.copy(replica)
        return replica


def replica_of(catalog: LocalCatalog, saved: CheckpointMetadata) -> Replica:
    return Replica(
        folder=catalog.folder(saved), attempt=saved.id, manifest_digest=saved.manifest_digest, step=saved.step
    )


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.replicator.close()


def down(verb: str, name: str) -> None:
    raise StorageError("away")


def loaded(storage: MemoryStorage | TieredStorage, replica: Replica) -> bytes:
    found = load(storage, replica.folder, manifest_digest=replica.manifest_digest, rank=0)
    return bytes(next(iter(found.saved.data.values())))


def of(storage: MemoryStorage, replica: Replica) -> dict[str, bytes]:
    return storage.files(replica.folder)


def image_of(storage: MemoryStorage, replica: Replica, rank: int = 0) -> str:
    return next(name for name in of(storage, replica) if name.endswith(f"rank-{rank:05d}.safetensors"))


# -- copying ----------------------------------------------------------------------------------


def test_the_handle_reports_that_its_checkpoint_is_copied(pair: Pair) -> None:
    info, late = an_info(1), an_info(1)
    pair.replicator.follow(info)
    saved = save(pair.both, pair.catalog, STATE, 1)
    info.began(saved)
    late.began(saved)
    pair.replicator.add(replica_of(pair.catalog, saved))
    pair.replicator.wait(LIMIT_S)
    pair.replicator.follow(late)
    assert (info.replicated, late.replicated) == (True, True)


def test_copy_failures_are_reported_to_the_waiting_caller(pair: Pair) -> None:
    first = pair.save(1)
    pair.far.fault = down
    pair.replicator.add(first)
    pair.replicator.add(pair.save(2))
    with pytest.raises(StorageError, match=r"steps \[1, 2\] .* yet: away"):
        pair.replicator.wait(0.2)
    retain(pair.catalog, pair.both, Keep(latest=1), now_unix_ms=0)
    assert committed(pair.near, first.folder) is not None, "nothing goes while nobody can look afar"
    pair.far.fault = lambda verb, name: None
    pair.replicator.wait(LIMIT_S)
    retain(pair.catalog, pair.both, Keep(latest=1), now_unix_ms=0)
    assert [c.step for c in pair.catalog.all()] == [2]


def test_an_unreachable_far_storage_fails_the_catalog_list_and_the_first_save(pair: Pair) -> None:
    class Away(MemoryStorage):
        def list(self, folder: str = "") -> list[str]:
            raise StorageError("away")

    catalog = local_catalog(both := TieredStorage(pair.near, Away()))
    with pytest.raises(StorageError, match="away"):
        save(both, catalog, STATE, 1)
    with pytest.raises(StorageError, match="away"):
        catalog.all()


def test_a_corrupt_image_is_not_spread(pair: Pair) -> None:
    replica = pair.save(1)
    pair.near.flip(image_of(pair.near, replica), CHUNK_BYTES)
    with pytest.raises(CheckpointCorrupt, match="differs from the saved data"):
        pair.copy(replica)
    assert of(pair.far, replica) == {}


def test_a_checkpoint_that_retention_removed_before_its_copy_is_no_failure(pair: Pair) -> None:
    replica = pair.save(1)
    for name in of(pair.near, replica):
        pair.near.delete(name)
    pair.copy(replica)
    assert of(pair.far, replica) == {}


def test_a_copy_interrupted_by_a_crash_is_completed(pair: Pair) -> None:
    replica = pair.save(1)
    image = image_of(pair.near, replica)
    put(pair.far, image, pair.near.objects[image])
    pair.copy(replica)
    assert of(pair.far, replica) == of(pair.near, replica)


def test_copies_of_an_earlier_process_are_resumed_with_the_first_save(pair: Pair) -> None:
    earlier = pair.save(1)
    replicator = pair.start(0, missing=lambda: [earlier])
    now = pair.save(2)
    replicator.add(now)
    replicator.wait(LIMIT_S)
    replicator.close()
    assert committed(pair.far, earlier.folder) is not None
    assert committed(pair.far, now.folder) is not None


def test_the_copy_of_an_incremental_includes_the_images_it_uses(pair: Pair) -> None:
    base, replica = pair.with_incremental()
    pair.copy(replica)
    assert {name for name in pair.far.objects if name.startswith(base.folder)} == {image_of(pair.near, base)}
    found = load(pair.far, replica.folder, manifest_digest=replica.manifest_digest, rank=0)
    data = {name: bytes(data) for name, data in found.saved.data.items()}
    assert data == {**FROZEN, "step": b"2" * CHUNK_BYTES}


# -- reading ----------------------------------------------------------------------------------


def test_a_new_host_finds_all_checkpoints_in_the_far_storage(pair: Pair) -> None:
    replica = pair.replicate(1)
    here = TieredStorage(MemoryStorage(), pair.far)
    catalog = local_catalog(here, start=5)
    assert [(c.step, c.latest) for c in catalog.all()] == [(1, True)]
    assert loaded(here, replica) == STATE["weights"]
    newer = save(here, catalog, STATE, 2)
    assert newer.generation == 2, "above what the far storage knows"


def test_each_file_is_read_from_the_nearest_storage_that_has_it(pair: Pair) -> None:
    replica = pair.replicate(1)
    requested: list[str] = []
    pair.far.fault = lambda verb, name: requested.append(name)
    assert loaded(pair.both, replica) == STATE["weights"]
    assert requested == []
    image = image_of(pair.near, replica)
    del pair.near.objects[image]
    assert loaded(pair.both, replica) == STATE["weights"]
    assert set(requested) == {image}


def test_the_far_storage_is_read_if_the_near_storage_fails(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    replica = pair.replicate(1)
    pair.near.fault = down
    assert loaded(pair.both, replica) == STATE["weights"]
    assert "away" in caplog.text


def test_an_object_that_both_tiers_lack_is_missing(pair: Pair) -> None:
    for read in (pair.both.read, pair.both.size):
        with pytest.raises(ObjectMissing):
            read("no/such")
    with pytest.raises(ObjectMissing):
        pair.both.source("no/such").read_into(0, memoryview(bytearray(1)))


# -- deletion and holds -----------------------------------------------------------------------


def test_the_newest_far_copy_is_kept_until_a_newer_copy_is_complete(pair: Pair) -> None:
    kept = pair.replicate(1)
    pair.save(2)
    pair.save(3)
    retain(pair.catalog, pair.both, Keep(latest=1), now_unix_ms=0)
    assert [c.step for c in pair.catalog.all()] == [1, 3]
    assert committed(pair.far, kept.folder) is not None
    pair.replicate(4)
    retain(pair.catalog, pair.both, Keep(latest=1), now_unix_ms=0)
    assert [c.step for c in pair.catalog.all()] == [4]
    assert of(pair.far, kept) == {}


@pytest.mark.parametrize("spoilt", ["a part alone", "a damaged copy"])
def test_an_unrestorable_far_copy_does_not_count_as_the_newest_one(pair: Pair, spoilt: str) -> None:
    kept = pair.replicate(1)
    if spoilt == "a part alone":
        saver = Saver(storage=pair.both, catalog=pair.catalog, commit_timeout_s=5)
        request = SaveRequest(step=2, type=CheckpointType.MODEL_ONLY)
        part = replica_of(pair.catalog, saver.save(snapshot_of(STATE), request, an_info(2)))
        pair.copy(part)
    else:
        part = pair.replicate(2)
        image = image_of(pair.far, part)
        pair.far.objects[image] = pair.far.objects[image][:-1]
    pair.save(3)
    retain(pair.catalog, pair.both, Keep(latest=1), now_unix_ms=0)
    assert committed(pair.far, kept.folder) is not None, "what is left if this host is lost"
    pair.replicate(4)
    retain(pair.catalog, pair.both, Keep(latest=1), now_unix_ms=0)
    assert of(pair.far, kept) == {}


def test_a_hold_is_visible_to_other_hosts_and_needs_no_far_storage(pair: Pair) -> None:
    pair.both.create_once("generations/000001", b"{}")
    pair.both.hold("generations/000001")
    elsewhere = TieredStorage(MemoryStorage(), pair.far)
    assert elsewhere.is_held("generations/000001")
    assert elsewhere.list("generations") == ["000001"]
    pair.both.release("generations/000001")
    assert not elsewhere.is_held("generations/000001")
    pair.far.fault = down
    pair.both.hold("generations/000001")
    assert pair.near.is_held("generations/000001")


def test_a_closing_replicator_leaves_its_copy_unfinished(pair: Pair) -> None:
    reached, go = threading.Event(), threading.Event()

    def slow(verb: str, name: str) -> None:
        if verb == "write":
            reached.set()
            assert go.wait(LIMIT_S)

    pair.far.fault = slow
    pair.replicator.add(pair.save(1))
    assert reached.wait(LIMIT_S)
    closing = threading.Thread(target=pair.replicator.close)
    closing.start()
    go.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    assert not any(name.endswith(MARKER) for name in pair.far.objects)
