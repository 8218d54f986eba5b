"""Several ranks that save one step together, each in its own thread; the catalog's real code answers them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strata.checkpoint.catalog.protocol import CheckpointMetadata, SaveRequest
from strata.checkpoint.copies.far_copy import Replica
from strata.checkpoint.copies.tiers import TieredStorage
from strata.checkpoint.format.manifest import RankManifest
from strata.checkpoint.restore.reader import load
from strata.checkpoint.save.bases import DamagedCheckpoints
from strata.checkpoint.save.replicated_tensors import Replication
from strata.checkpoint.save.retry import SaveRetry
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.storage.sink import Storage
from strata.client.checkpoints.catalog import CoordinatedCatalog
from strata.core.kv.records import CheckpointType
from strata.errors import StrataError
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.ports import Cluster
from tests.unit.checkpoint.saves import an_info, snapshot_of

LIMIT_S = 20.0
STEP = 20


def catalogs_of(cluster: Cluster, count: int) -> list[CoordinatedCatalog]:
    """Return the catalogs of `count` ranks; attempt ids are unique across them."""
    ids = itertools.count(1)
    return [
        CoordinatedCatalog(
            cluster.port(rank),
            root_uri="file:///data",
            new_id=lambda: f"a{next(ids)}",
            save_wait_s=LIMIT_S,
        )
        for rank in range(count)
    ]


class Ranks:
    """`count` ranks. `ends` has the result of each rank's save; `on_step` is called at each step of a save.

    After a refusal by storage, each rank retries its save for `grace_s`, as its own entry of `retries` prescribes.
    """

    def __init__(
        self,
        count: int,
        *,
        near: MemoryStorage | None = None,
        far: Storage | None = None,
        grace_s: float = 0.0,
    ) -> None:
        self.near = near or MemoryStorage()
        self.storage: Storage = self.near if far is None else TieredStorage(self.near, far)
        self.held = threading.Event()
        """Set once a rank has held its save."""
        self.cluster = Cluster(**{f"w{rank}": 1 for rank in range(count)})
        self.catalogs = catalogs_of(self.cluster, count)
        self.damaged = [DamagedCheckpoints() for _ in range(count)]
        self.infos = [an_info(STEP) for _ in range(count)]
        self.retries = [
            SaveRetry(grace_s=grace_s, tell=lambda hold: self.held.set(), pauses_s=(0.01,))
            for _ in range(count)
        ]
        self.ends: dict[int, CheckpointMetadata | StrataError] = {}
        self.on_step: Callable[[str], None] = lambda step: None
        self._threads: list[threading.Thread] = []

    def begin(
        self,
        *ranks: int,
        step: int = STEP,
        states: Sequence[Any] = (),
        paths: Sequence[Sequence[str]] = (),
        kinds: Sequence[CheckpointType] = (CheckpointType.FULL,),
        timeout_s: float = LIMIT_S,
        **request: Any,
    ) -> None:
        """Begin the saves of these ranks, or of all; `paths`: per rank, the paths it declares replicated."""

        def run(rank: int) -> None:
            saver = Saver(
                storage=self.storage,
                catalog=self.catalogs[rank],
                commit_timeout_s=timeout_s,
                damaged=self.damaged[rank],
                on_step=self.on_step,
                retry=self.retries[rank],
            )
            declared = frozenset(paths[rank]) if paths else frozenset()
            replication = Replication(rank=rank, ranks=len(self.catalogs), paths=declared)
            snapshot = snapshot_of(states[rank] if states else {"rank": rank}, replication=replication)
            save_request = SaveRequest(step=step, type=kinds[rank % len(kinds)], **request)
            try:
                self.ends[rank] = saver.save(snapshot, save_request, self.infos[rank])
            except StrataError as error:
                self.ends[rank] = error

        self._threads = [
            threading.Thread(target=run, args=(rank,)) for rank in ranks or range(len(self.infos))
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        for thread in self._threads:
            thread.join(3 * LIMIT_S)
            assert not thread.is_alive()

    def save(self, *ranks: int, **how: Any) -> list[Any]:
        """Save, and return the record of each rank, or its error."""
        self.begin(*ranks, **how)
        self.end()
        return [self.ends[rank] for rank in sorted(self.ends)]

    @property
    def record(self) -> CheckpointMetadata:
        """The coordinators' record of the newest save."""
        return self.catalogs[0].all()[-1]

    @property
    def folder(self) -> str:
        return self.catalogs[0].folder(self.record)

    @property
    def replica(self) -> Replica:
        """The newest save, as a copier's argument."""
        record = self.record
        return Replica(
            folder=self.folder, attempt=record.id, manifest_digest=record.manifest_digest, step=record.step
        )

    def states(self) -> list[object]:
        """Return the state of each rank's record, or its error."""
        return [getattr(self.ends[rank], "state", self.ends[rank]) for rank in sorted(self.ends)]

    def loaded(self, rank: int, state: Mapping[str, Any] | None = None) -> Any:
        return load(
            self.storage, self.folder, manifest_digest=self.record.manifest_digest, rank=rank, state=state
        )

    def manifest(self, rank: int) -> RankManifest:
        name = f"{self.folder}/rank-{rank:05d}.json"
        return RankManifest.from_bytes(self.near.objects[name], what=name)
