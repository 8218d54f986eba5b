"""Whole saves into any storage, for the tests of this folder."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import Catalog, CheckpointMetadata, SaveRequest
from strata.checkpoint.restore.reader import Loaded, load
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.save.replicated_tensors import Replication
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.snapshot import rng
from strata.checkpoint.snapshot.snapshot import Arena, Snapshot, take_snapshot
from strata.checkpoint.snapshot.state import Flat
from strata.checkpoint.storage.sink import OnStep, Storage, unobserved
from strata.core.kv.records import CheckpointType
from tests.unit.checkpoint.memory_storage import MemoryStorage


def snapshot_of(state: Any, *, with_rng: bool = False, replication: Replication | None = None) -> Snapshot:
    flat = Flat(replication=replication)
    tree = flat.add("", state)
    generators = flat.add("__rng__", rng.capture()) if with_rng else None
    return take_snapshot(flat, tree=tree, rng=generators, arena=Arena())


def local_catalog(storage: Storage, *, start: int = 0) -> LocalCatalog:
    """Return a catalog whose attempts are a0, a1, … and whose clock counts up from `start`."""
    numbers, clock = itertools.count(start), itertools.count(start)
    return LocalCatalog(storage, new_id=lambda: f"a{next(numbers)}", now_unix_ms=lambda: next(clock))


def an_info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step=step, epoch=0, checkpoint_type=CheckpointType.FULL, metadata={})


def save(
    storage: Storage,
    catalog: LocalCatalog,
    state: Any,
    step: int,
    *,
    on_step: OnStep = unobserved,
    metadata: Mapping[str, str] | None = None,
    with_rng: bool = False,
) -> CheckpointMetadata:
    """Save `state` as the only rank and return the committed checkpoint."""
    saver = Saver(storage=storage, catalog=catalog, commit_timeout_s=5, on_step=on_step)
    request = SaveRequest(step=step, metadata=metadata or {})
    return saver.save(snapshot_of(state, with_rng=with_rng), request, an_info(step))


def loaded(storage: Storage, catalog: Catalog, checkpoint: CheckpointMetadata, rank: int = 0) -> Any:
    """Return the state that `rank` saved."""
    folder = catalog.folder(checkpoint)
    saved = load(storage, folder, manifest_digest=checkpoint.manifest_digest, rank=rank).saved
    return saved.value(saved.tree)


class Saved:
    """One committed checkpoint of a state, its storage, and its folder."""

    def __init__(self, state: Any) -> None:
        self.storage = MemoryStorage()
        self.catalog = local_catalog(self.storage)
        self.checkpoint: CheckpointMetadata = save(self.storage, self.catalog, state, 20)
        self.folder = self.catalog.folder(self.checkpoint)

    def load(self) -> Loaded:
        return load(self.storage, self.folder, manifest_digest=self.checkpoint.manifest_digest, rank=0)

    def value(self) -> Any:
        return loaded(self.storage, self.catalog, self.checkpoint)

    def name(self, file: str) -> str:
        return f"{self.folder}/{file}"
