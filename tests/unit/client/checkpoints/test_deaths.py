"""One of two ranks dies at each step of a save: catalog and storage must still agree, and the next world must continue.

A dead rank acts no more: in this test its thread stops for good at the moment of its death. The other ranks see no
difference. tests/crashes covers the state that SIGKILL leaves of a process on disk.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.catalog.protocol import CheckpointMetadata, SaveRequest
from strata.checkpoint.format.marker import committed
from strata.checkpoint.restore.verify import verify
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.sink import unobserved
from strata.client.checkpoints.catalog import CoordinatedCatalog
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.kv.records import CheckpointState
from strata.errors import StrataError
from tests.unit.checkpoint.ports import Cluster
from tests.unit.checkpoint.saves import an_info, snapshot_of

RANKS = (0, 1)
LIMIT_S = 30
GRACE_S = 0.5
_numbers = itertools.count()


def state_of(step: int, rank: int) -> dict[str, Any]:
    return {"w": np.full(300, step + rank / 10), "step": step, "rank": rank}


class Dead(BaseException):
    """Raised in a dead thread at the end of the test, to unwind its frames."""


class Death:
    """Stop one rank's thread just before its nth step; with 0, stop no thread."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.steps: list[str] = []
        self.came = threading.Event()
        self.over = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, step: str) -> None:
        if self.over.is_set():
            raise Dead
        with self._lock:
            self.steps.append(step)
            dies = len(self.steps) == self.nth
        if dies:
            self.came.set()
            self.over.wait(LIMIT_S)
            raise Dead


class World:
    """Two ranks of a job, over one storage root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cluster = Cluster(a=1, b=1)
        self.reported: list[int] = []
        self.cancelled = threading.Event()
        """Set when the survivors give up, so that no survivor waits for the dead rank forever."""

    def storage(self, on_step: Callable[[str], None] = unobserved) -> LocalStorage:
        return LocalStorage(self.root, nonce=lambda: f"n{next(_numbers)}", on_step=on_step)

    def save(self, step: int, deaths: dict[int, Death]) -> list[threading.Thread]:
        """Make both ranks save the step; return their threads."""
        threads = [
            threading.Thread(target=self._save, args=(step, rank, deaths.get(rank)), daemon=True)
            for rank in RANKS
        ]
        for thread in threads:
            thread.start()
        return threads

    def _save(self, step: int, rank: int, death: Death | None) -> None:
        on_step = death or unobserved
        storage = self.storage(on_step)
        catalog = CoordinatedCatalog(
            self.cluster.port(rank),
            root_uri=storage.uri,
            new_id=lambda: f"attempt-{next(_numbers)}",
            save_wait_s=1,
        )
        saver = Saver(storage=storage, catalog=catalog, commit_timeout_s=LIMIT_S, threads=1, on_step=on_step)
        info = an_info(step)
        info.cancelled = self.cancelled
        try:
            saver.save(snapshot_of(state_of(step, rank)), SaveRequest(step=step), info)
        except (StrataError, Dead):
            return
        finally:
            catalog.close()
        self.reported.append(step)


def a_death(root: Path, victim: int, nth: int) -> tuple[World, Death]:
    """Return a world that committed step 20, and whose rank `victim` died during the save of step 40."""
    world, death = World(root), Death(nth)
    for thread in world.save(20, {}):
        thread.join(LIMIT_S)
    threads = world.save(40, {victim: death})
    alive = [thread for rank, thread in enumerate(threads) if rank != victim or not nth]
    if nth:
        assert death.came.wait(LIMIT_S)
        for thread in alive:
            thread.join(GRACE_S)  # steps that do not need the dead rank complete
        world.cancelled.set()
    for thread in alive:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return world, death


def complaints(world: World) -> Iterator[str]:
    """Yield each inconsistency found when the next world begins."""
    world.cluster.next_world()
    storage = world.storage()
    by_folder = {record.path.rpartition("/")[2]: record for record in world.cluster.records()}
    for name in storage.list("job"):
        if not name.startswith("step-"):
            continue
        record = by_folder.get(name)
        known = record is not None and record.state is CheckpointState.COMMITTED
        if committed(storage, f"job/{name}") is not None and not known:
            yield f"storage has {name} as committed, and the catalog has {record}"
        if known and record is not None:
            found = verify(storage, f"job/{name}", manifest_digest=record.manifest_digest)
            if not found.good:
                yield f"{name}: {found.problems[0]}"
    newest = max(r.step for r in world.cluster.records() if r.state is CheckpointState.COMMITTED)
    if newest < max(world.reported):
        yield f"step {max(world.reported)} was told to be committed, and the newest is {newest}"
    yield from _goes_on(world, newest)


def _goes_on(world: World, newest: int) -> Iterator[str]:
    point = world.cluster.restore_point()
    managers = [
        CheckpointManager(world.root, client=world.cluster.port(rank, restore=point), capture_rng=False)
        for rank in RANKS
    ]
    restored: list[CheckpointMetadata | None] = []
    for rank, manager in enumerate(managers):
        state: dict[str, Any] = {"w": np.zeros(300), "step": None, "rank": None}
        restored.append(manager.restore(state))
        expected = state_of(newest, rank)
        if not (np.array_equal(state["w"], expected["w"]) and state["rank"] == rank):
            yield f"rank {rank} restored something else than it saved at step {newest}"
    if [r.step if r is not None else None for r in restored] != [newest, newest]:
        yield f"step {newest} is the newest, and {restored} were restored"
    folder = next(world.root.glob(f"job/step-*{newest}-gen-*-{restored[0].id}" if restored[0] else ""))
    if not (folder / "COMMIT").exists():
        yield f"step {newest} has no marker, though it was restored"
    infos = [manager.save_state(state_of(60, rank), 60) for rank, manager in enumerate(managers)]
    for info, manager in zip(infos, managers, strict=True):
        info.wait(LIMIT_S)
        manager.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", RANKS)
def test_whichever_step_a_rank_dies_at_the_catalog_and_storage_agree(tmp_path: Path, victim: int) -> None:
    _, whole = a_death(tmp_path / "whole", victim, 0)
    steps = whole.steps
    assert {"begin", "ack", "mark", "marked"} <= set(steps)
    assert ("seal" in steps) == (victim == 0)

    def one(nth: int) -> list[str]:
        world, death = a_death(tmp_path / str(nth), victim, nth)
        try:
            return [f"{steps[nth - 1]} ({nth}): {wrong}" for wrong in complaints(world)]
        finally:
            death.over.set()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(1, len(steps) + 1)))
    assert [wrong for each in found for wrong in each] == []
