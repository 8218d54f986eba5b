"""Several ranks that save one step together, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strata.checkpoint.catalog import CheckpointMetadata, SaveRequest
from strata.checkpoint.far_copy import Replica
from strata.checkpoint.reader import load
from strata.checkpoint.replication import Replication
from strata.checkpoint.save_retry import SaveRetry
from strata.checkpoint.saving import Saver
from strata.checkpoint.sink import Storage
from strata.checkpoint.tiers import TieredStorage
from strata.errors import StrataError
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import an_info, snapshot_of
from tests.unit.checkpoint.shared_catalog import SharedCatalog

LIMIT_S = 20.0
STEP = 20


class Ranks:
    """`count` ranks; `ends` has what came of each one's save, `on_step` hears their steps.

    They hold a save for `grace_s`, each by its own of `retries`.
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
        """Whether one of them holds its save, or has done so."""
        self.shared = SharedCatalog(count)
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
        states: Sequence[Any] = (),
        paths: Sequence[Sequence[str]] = (),
        timeout_s: float = LIMIT_S,
        **request: Any,
    ) -> None:
        """Begin the saves of these ranks, or of all; `paths` are those that each declares to be replicated."""

        def run(rank: int) -> None:
            saver = Saver(
                storage=self.storage,
                catalog=self.shared.of(rank),
                commit_timeout_s=timeout_s,
                on_step=self.on_step,
                retry=self.retries[rank],
            )
            declared = frozenset(paths[rank]) if paths else frozenset()
            replication = Replication(rank=rank, ranks=self.shared.world_size, paths=declared)
            snapshot = snapshot_of(states[rank] if states else {"rank": rank}, replication=replication)
            try:
                self.ends[rank] = saver.save(snapshot, SaveRequest(step=STEP, **request), self.infos[rank])
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

    def save(self, *ranks: int, **how: Any) -> None:
        self.begin(*ranks, **how)
        self.end()

    @property
    def record(self) -> CheckpointMetadata:
        return self.shared.records[STEP]

    @property
    def folder(self) -> str:
        return self.shared.of(0).folder(self.record)

    @property
    def replica(self) -> Replica:
        """What they saved, as what copies it knows it."""
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
