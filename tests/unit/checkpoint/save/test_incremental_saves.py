"""Incrementals of several ranks; the catalog's real code answers them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.catalog.protocol import CheckpointMetadata, SaveRequest
from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.format.marker import committed
from strata.client.checkpoints.catalog import CoordinatedCatalog
from strata.core.kv.records import CheckpointState, CheckpointType
from strata.errors import CheckpointAborted, Conflict
from tests.not_none import not_none
from tests.unit.checkpoint.ranks import Ranks
from tests.unit.checkpoint.saves import loaded

LIMIT_S = 20
INCREMENTAL = CheckpointType.INCREMENTAL


class World(Ranks):
    """Two ranks with one storage, each with its own catalog over the same job."""

    def __init__(self) -> None:
        super().__init__(2)

    def saved(self, step: int, states: list[Any], *kinds: CheckpointType) -> list[Any]:
        """Save each rank's state with its checkpoint type; return each rank's record or error."""
        return self.save(step=step, states=states, kinds=kinds or (INCREMENTAL,))

    def load(self, record: CheckpointMetadata, rank: int) -> Any:
        return loaded(self.near, self.catalogs[rank], record, rank)


@pytest.fixture
def world() -> World:
    return World()


def states(fill: int = 0) -> list[dict[str, Any]]:
    """Return each rank's state: two chunks that never change, and 9 bytes of `fill`."""
    return [
        {"frozen": np.full(2 * CHUNK_BYTES, rank, np.uint8), "hot": np.full(9, fill, np.uint8)}
        for rank in (0, 1)
    ]


def test_each_rank_writes_its_changed_chunks_and_the_record_names_the_base(world: World) -> None:
    full, _ = world.saved(1, states(1))
    one, other = world.saved(2, states(2))
    assert (full.checkpoint_type, one.checkpoint_type) == (CheckpointType.FULL, INCREMENTAL)
    assert (one.base_step, one.base_attempt) == (1, full.id)
    assert one.id == other.id
    assert one.size_bytes == 2 * (4096 + 9)
    proof = not_none(committed(world.near, world.folder))
    assert proof[0].uses == (world.catalogs[0].folder(full).rpartition("/")[2],)
    for rank in (0, 1):
        back = world.load(one, rank)
        assert (back["frozen"] == rank).all()
        assert back["hot"].tolist() == [2] * 9
    latest = not_none(world.catalogs[0].latest())
    assert latest.id == one.id
    assert committed(world.near, world.catalogs[0].folder(one)) is not None


def test_an_incremental_does_not_use_a_base_deleted_before_its_begin(world: World) -> None:
    """Retention deletes the base before a begin: the catalog refuses the base, and the ranks write all bytes."""
    full, _ = world.saved(1, states(1))
    world.saved(2, states(2), CheckpointType.FULL)
    world.catalogs[0].delete(full)
    for catalog in world.catalogs:
        catalog.latest = lambda: full  # type: ignore[method-assign]  # a stale answer
    record, _ = world.saved(3, states(3))
    assert record.checkpoint_type is CheckpointType.FULL
    assert world.manifest(0).files == ()


def test_ranks_that_chose_another_type_follow_the_rank_that_began_first(world: World) -> None:
    """The rank that begins first decides: a Full of all ranks, or an Incremental in which one rank writes all."""
    world.saved(1, states(1))
    changed = [states(2)[0], {"frozen": np.full(2 * CHUNK_BYTES, 77, np.uint8), "hot": states(2)[1]["hot"]}]
    one, other = world.saved(2, changed)
    assert one.checkpoint_type is other.checkpoint_type
    assert world.manifest(1).files == ()
    assert (world.load(one, 1)["frozen"] == 77).all()
    assert not world.load(one, 0)["frozen"].any()


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_with_a_corrupt_base_writes_its_part_in_full_in_either_order(world: World, first: int) -> None:
    """One rank's restore found damage, so this rank requests a Full.

    The other rank may have begun an Incremental before.
    """
    full, _ = world.saved(1, states(1))
    world.damaged[1].note(world.catalogs[1].folder(full), "")
    begun, begin = threading.Event(), CoordinatedCatalog.begin

    for rank, catalog in enumerate(world.catalogs):

        def in_turn(
            request: SaveRequest, rank: int = rank, catalog: CoordinatedCatalog = catalog
        ) -> CheckpointMetadata:
            if rank != first:
                assert begun.wait(LIMIT_S)
            try:
                return begin(catalog, request)
            finally:
                begun.set()

        catalog.begin = in_turn  # type: ignore[method-assign]  # the order of the two is the test
    one, _ = world.saved(2, states(2))
    assert one.checkpoint_type is (INCREMENTAL, CheckpointType.FULL)[first]
    assert world.manifest(1).files == ()
    assert (world.load(one, 1)["frozen"] == 1).all()
    two, _ = world.saved(3, states(3))
    assert two.checkpoint_type is INCREMENTAL
    assert {image.folder for image in world.manifest(1).files} == {
        world.catalogs[0].folder(one).rpartition("/")[2]
    }
    assert world.manifest(1).image_bytes == 4096 + 9, "it builds on its own again"


def test_ranks_that_save_different_checkpoint_types_abort_the_attempt(world: World) -> None:
    one, other = world.saved(1, states(1), CheckpointType.FULL, CheckpointType.MODEL_ONLY)
    kinds = {type(one), type(other)}
    assert kinds == {Conflict, CheckpointAborted}
    assert [c.state for c in world.catalogs[0].all()] == [CheckpointState.ABORTED]
