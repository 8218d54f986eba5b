from __future__ import annotations

import json
from typing import Any

import pytest

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.format.manifest import GLOBAL_NAME
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.format.marker import committed
from strata.core.kv.records import CheckpointState
from strata.errors import (
    CheckpointAborted,
    Conflict,
    StorageError,
    Unavailable,
)
from tests.not_none import not_none
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.ranks import Ranks
from tests.unit.checkpoint.saves import an_info, local_catalog, save


def test_all_ranks_see_the_commit_and_one_marker_is_written() -> None:
    ranks = Ranks(3)
    ranks.save(0, 1, 2)
    assert {getattr(end, "state", end) for end in ranks.ends.values()} == {CheckpointState.COMMITTED}
    proof = not_none(committed(ranks.near, ranks.folder))
    assert [part.rank for part in proof[0].parts] == [0, 1, 2]
    assert sorted(name.rpartition("/")[2] for name in ranks.near.objects) == sorted(
        [MARKER, GLOBAL_NAME, *(f"rank-0000{r}.{end}" for r in range(3) for end in ("json", "safetensors"))]
    )


@pytest.mark.parametrize("file", ["rank-00001.safetensors", "rank-00001.json", GLOBAL_NAME])
def test_a_rank_that_cannot_write_ends_the_save_for_all(file: str) -> None:
    ranks = Ranks(2)
    ranks.near.fail(StorageError("disk full"), "finish", name=file)
    ranks.save(0, 1)
    failed = 0 if file == GLOBAL_NAME else 1
    assert isinstance(ranks.ends[failed], StorageError)
    other = ranks.ends[1 - failed]
    assert isinstance(other, CheckpointAborted)
    assert f"rank {failed}: disk full" in str(other)
    assert ranks.record.state is CheckpointState.ABORTED
    assert f"{ranks.folder}/{MARKER}" not in ranks.near.objects


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_differs_from_its_ack_is_not_sealed(rank: int) -> None:
    ranks = Ranks(2)
    read = ranks.near.read

    def misread(name: str) -> bytes:
        if not name.endswith(f"{rank}.json"):
            return read(name)
        body = json.loads(read(name))
        return json.dumps({**body, "image": {**body["image"], "header_digest": "0" * 32}}).encode()

    ranks.near.read = misread  # type: ignore[method-assign]  # a storage that changes bytes
    ranks.save(0, 1)
    assert isinstance(ranks.ends[0], StorageError if rank == 0 else Conflict)
    assert isinstance(ranks.ends[1], CheckpointAborted)
    assert ranks.record.state is CheckpointState.ABORTED
    assert f"{ranks.folder}/{MARKER}" not in ranks.near.objects


def test_a_rank_that_comes_late_learns_that_the_save_was_given_up() -> None:
    ranks = Ranks(2)
    ranks.infos[0].cancel()
    ranks.save(0)
    ranks.save(1)
    assert all(isinstance(end, CheckpointAborted) for end in ranks.ends.values())
    ranks.infos = [an_info(20) for _ in range(2)]
    given_up = ranks.record.id
    ranks.save(0, 1, replaces=given_up)
    (again,) = {getattr(end, "id", end) for end in ranks.ends.values()}
    assert again not in {given_up, None}


def test_a_rank_that_never_comes_ends_the_save_after_its_time() -> None:
    ranks = Ranks(2)
    ranks.save(0, timeout_s=0.1)
    assert isinstance(ranks.ends[0], Unavailable)
    assert ranks.record.state is CheckpointState.ABORTED


def test_an_error_after_the_commit_happened_does_not_undo_it() -> None:
    ranks = Ranks(1)
    catalog, seal = ranks.catalogs[0], ranks.catalogs[0].seal

    def commits_and_loses_the_answer(*sealed: Any) -> CheckpointMetadata:
        seal(*sealed)
        raise Unavailable("no answer")

    catalog.seal = commits_and_loses_the_answer  # type: ignore[assignment, method-assign]  # this object's own
    ranks.save(0)
    end = ranks.ends[0]
    assert isinstance(end, CheckpointMetadata)
    assert committed(ranks.near, ranks.folder) is not None


@pytest.mark.parametrize(
    ("stranger", "printed"),
    [(True, "belongs to another save"), (False, "one storage root that they share")],
)
def test_a_part_of_another_save_or_in_another_storage_is_not_composed(stranger: bool, printed: str) -> None:
    ranks, others = Ranks(2), Ranks(2)
    others.save(0, 1)

    def exchange(step: str) -> None:
        for name in [n for n in ranks.near.objects if step == "ack" and n.endswith("rank-00001.json")]:
            del ranks.near.objects[name]
            if stranger:
                ranks.near.objects[name] = others.near.objects[f"{others.folder}/rank-00000.json"]

    ranks.on_step = exchange
    ranks.save(0, 1)
    assert printed in str(ranks.ends[0])
    assert isinstance(ranks.ends[1], CheckpointAborted)


def test_steps_come_in_the_order_of_the_protocol() -> None:
    ranks, steps = Ranks(1), list[str]()
    ranks.on_step = steps.append
    ranks.near.fault = lambda verb, name: steps.append(f"{verb} {name.rpartition('/')[2]}")
    ranks.save(0)
    order = [s for s in steps if not s.startswith(("read", "begin ", "write"))]
    assert order == [
        "begin",
        "finish rank-00000.safetensors",
        "create rank-00000.safetensors",
        "finish rank-00000.json",
        "create rank-00000.json",
        "ack",
        "finish manifest.json",
        "create manifest.json",
        "seal",
        "mark",
        "create COMMIT",
        "marked",
    ]


def test_a_retried_save_writes_the_marker_that_failed() -> None:
    """The catalog has the save as committed, but a catalog from storage alone recognises it only by its marker."""
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    storage.fail(StorageError("disk full"), "create", name=MARKER)
    with pytest.raises(StorageError, match="disk full"):
        save(storage, catalog, {"w": 1}, 20)
    with pytest.raises(StorageError, match="disk full"):  # no commit is reported without a marker
        save(storage, catalog, {"w": 1}, 20)
    storage.heal()
    assert save(storage, catalog, {"w": 1}, 20).state is CheckpointState.COMMITTED
    assert [c.step for c in local_catalog(storage).all()] == [20]
