"""The number of storage and coordinator requests of a save, which must not depend on the number of kept checkpoints."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.copies.tiers import TieredStorage
from strata.checkpoint.storage.sink import Storage
from strata.client.checkpoints.manager import CheckpointManager
from strata.client.checkpoints.retention import retain
from strata.core.checkpoints.references import Keep
from strata.core.kv.records import CheckpointState
from strata.v1 import checkpoints_pb2 as pb
from tests.storage.s3_stub import StubS3, serving
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.ports import Cluster
from tests.unit.checkpoint.saves import local_catalog, save

FEW, MANY = 4, 60


class Counting(MemoryStorage):
    """Count the requests to a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in {"sink", "create_once", "is_held", "read", "exists", "list", "delete"}:
            self.requests[name] += 1
        return super().__getattribute__(name)

    def take(self) -> Counter[str]:
        requests, self.requests = self.requests, Counter()
        return requests


def saved(storage: Storage, catalog: LocalCatalog, step: int, keep: Keep) -> None:
    save(storage, catalog, {"a": step}, step)
    retain(catalog, storage, keep, now_unix_ms=0)


def kept_by(count: int, *, all_stay: bool) -> Keep:
    return Keep() if all_stay else Keep(latest=count)


@pytest.mark.parametrize("all_stay", [True, False])
@pytest.mark.parametrize("earlier", [True, False])
def test_save_requests_to_one_storage_do_not_grow_with_kept_checkpoints(
    all_stay: bool, earlier: bool
) -> None:
    """This also holds for checkpoints of an earlier process: this process verifies them with its first save."""

    def requests(kept: int) -> Counter[str]:
        storage, keep = Counting(), kept_by(kept, all_stay=all_stay)
        catalog = local_catalog(storage)
        for step in range(1, kept + 1):
            saved(storage, catalog, step, keep)
        if earlier:
            catalog.go_back()
            catalog = local_catalog(storage, start=10_000)
        saved(storage, catalog, kept + 1, keep)
        saved(storage, catalog, kept + 2, keep)
        storage.take()
        saved(storage, catalog, kept + 3, keep)
        return storage.take()

    assert requests(MANY) == requests(FEW)


@pytest.mark.parametrize("all_stay", [True, False])
def test_save_requests_to_two_storages_do_not_grow_with_kept_checkpoints(all_stay: bool) -> None:
    def requests(kept: int) -> tuple[Counter[str], Counter[str]]:
        near, far = Counting(), Counting()
        storage, keep = TieredStorage(near, far), kept_by(kept, all_stay=all_stay)
        catalog = local_catalog(storage)
        for step in range(1, kept + 3):
            saved(storage, catalog, step, keep)
            far.objects |= near.objects  # as the replicator copies them
        near.take(), far.take()
        saved(storage, catalog, kept + 3, keep)
        return near.take(), far.take()

    assert requests(MANY) == requests(FEW)


@pytest.mark.slow
@pytest.mark.parametrize("all_stay", [True, False])
def test_save_requests_to_s3_do_not_grow_with_kept_checkpoints(
    all_stay: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))

    def requests(kept: int) -> Counter[str]:
        with (
            serving(StubS3()) as stub,
            CheckpointManager(
                "s3://bucket/run",
                endpoint_url=stub.url,
                region="us-east-1",
                keep_count=None if all_stay else kept,
            ) as manager,
        ):
            for step in range(1, kept + 4):
                stub.requests.clear()
                manager.save(b"x", step).wait()
                manager.wait_until_finished()
            return Counter(request.kind for request in stub.requests)

    assert requests(8) == requests(2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("by_dcp", [True, False])
def test_save_requests_to_coordinators_do_not_grow_with_kept_checkpoints(
    by_dcp: bool, tmp_path: Path
) -> None:
    import torch  # noqa: PLC0415  # imported by this test only
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save  # noqa: PLC0415  # as above

    from strata.integrations.dcp import StrataWriter  # noqa: PLC0415  # as above

    def requests(kept: int, root: Path) -> Counter[str]:
        cluster, requests = Cluster(n1=1), Counter[str]()

        def note(request: Message) -> None:
            requests[type(request).__name__] += 1

        cluster.on_call = note
        port = cluster.port(0)
        one: Any = StrataWriter(root, client=port) if by_dcp else CheckpointManager(root, client=port)
        with closing(one):
            for step in range(1, kept + 2):
                requests.clear()
                if by_dcp:
                    dcp_save({"w": torch.zeros(3)}, checkpoint_id=str(step), storage_writer=one)
                    for thread in threading.enumerate():
                        if thread.name == "strata-garbage-collection":
                            thread.join()
                else:
                    one.save_state({"w": np.zeros(3)}, step).wait()
                    one.wait_until_finished()
        return requests

    many, few = requests(12, tmp_path / "many"), requests(2, tmp_path / "few")
    assert many == few
    assert pb.ListCheckpointsRequest.__name__ not in many, "it lists all that are kept"


# -- older checkpoints stay safe --------------------------------------------------------------


@pytest.mark.parametrize("looked_at", [LocalCatalog.all, LocalCatalog.latest])
def test_an_older_checkpoint_is_kept_while_the_newest_is_damaged_even_after_verification(
    looked_at: Any,
) -> None:
    """The damage comes after this process verified every checkpoint. There has been no read since."""
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    for step in (1, 2):
        saved(storage, catalog, step, Keep())
    assert looked_at(catalog)
    (folder,) = (name for name in storage.list() if name.startswith(f"step-{2:012d}-"))
    del storage.objects[f"{folder}/rank-00000.safetensors"]
    retain(catalog, storage, Keep(latest=1), now_unix_ms=0)
    assert [(c.step, c.state) for c in catalog.all()] == [
        (1, CheckpointState.COMMITTED),
        (2, CheckpointState.CORRUPT),
    ]


def test_a_checkpoint_half_deleted_by_another_process_is_removed() -> None:
    storage = MemoryStorage()
    earlier, catalog = local_catalog(storage), local_catalog(storage, start=50)
    for step in (1, 2):
        saved(storage, earlier, step, Keep())
    earlier.go_back()
    saved(storage, catalog, 3, Keep())
    folder = earlier.folder(catalog.all()[0])
    del storage.objects[f"{folder}/COMMIT"]  # the earlier process removed this file first, then died
    assert [c.step for c in catalog.all()] == [2, 3]
    saved(storage, catalog, 4, Keep())
    assert folder not in storage.list()
