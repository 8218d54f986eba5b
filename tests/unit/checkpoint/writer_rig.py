"""Writers whose disk a test can block and make fail."""

import threading
from typing import Any

from strata.checkpoint.catalog.protocol import CheckpointMetadata, SaveRequest
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.save.writer import AsyncCheckpointWriter, WhenFull
from strata.core.kv.records import CheckpointState
from strata.errors import StorageError
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.ports import Cluster, state_of
from tests.unit.checkpoint.ranks import catalogs_of
from tests.unit.checkpoint.saves import loaded, local_catalog

LIMIT_S = 20


class Rig:
    """A writer whose disk a test can block and make fail."""

    def __init__(self, **options: Any) -> None:
        self.storage = MemoryStorage()
        self.catalog = local_catalog(self.storage)
        self.go = threading.Event()
        self.go.set()
        self.waiting = threading.Event()
        self.storage.fault = self._fault
        self.full: set[int] = set()
        self.after: list[CheckpointMetadata | None] = []
        saver = Saver(storage=self.storage, catalog=self.catalog, commit_timeout_s=LIMIT_S)
        options.setdefault("after_save", self.after.append)
        self.writer = AsyncCheckpointWriter(saver, **options)

    def _fault(self, verb: str, name: str) -> None:
        if verb == "begin" and name.endswith("safetensors"):
            self.waiting.set()
            assert self.go.wait(LIMIT_S)
            if any(f"step-{step:012d}-" in name for step in self.full):
                raise StorageError("disk full")

    def write(self, step: int, state: Any = None) -> CheckpointInfo:
        return self.writer.write({"a": step} if state is None else state, SaveRequest(step=step))

    def loaded(self, step: int | None = None) -> Any:
        """Return the state saved at `step`, or the last one."""
        found = self.catalog.all()[-1]
        if step is not None:
            (found,) = (each for each in self.catalog.all() if each.step == step)
        return loaded(self.storage, self.catalog, found)

    def steps(self) -> list[int]:
        return [c.step for c in self.catalog.all()]


def full(**options: Any) -> tuple[Rig, CheckpointInfo, CheckpointInfo]:
    """Return a rig with one save being written and one waiting."""
    rig = Rig(**options)
    rig.go.clear()
    first = rig.write(20)
    assert rig.waiting.wait(LIMIT_S)
    return rig, first, rig.write(40)


class Pair:
    """Two ranks with a writer each; a test can block rank 0's storage."""

    def __init__(self, when_full: WhenFull) -> None:
        self.cluster = Cluster(a=1, b=1)
        self.rigs = [Rig(when_full=when_full) for _ in range(2)]
        self.writers = []
        storage = self.rigs[0].storage
        for rig, catalog in zip(self.rigs, catalogs_of(self.cluster, 2), strict=True):
            saver = Saver(storage=storage, catalog=catalog, commit_timeout_s=LIMIT_S)
            self.writers.append(AsyncCheckpointWriter(saver, when_full=when_full))
            rig.writer.close()

    def state_of(self, step: int) -> CheckpointState:
        return state_of(self.cluster, step)
