from __future__ import annotations

from typing import Any

import numpy as np

from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.format.manifest import RankManifest
from strata.checkpoint.format.marker import committed, read_rank_manifests
from strata.checkpoint.restore.diff import compare
from tests.not_none import not_none
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import local_catalog, save


def manifest_of(state: Any) -> RankManifest:
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    folder = catalog.folder(save(storage, catalog, state, 1))
    proof = not_none(committed(storage, folder))
    return read_rank_manifests(storage, folder, proof[0])[0]


def test_added_removed_and_changed_tensors_are_reported_by_chunks() -> None:
    big = np.zeros(3 * CHUNK_BYTES // 8 - 100)
    changed = big.copy()
    changed[-1] = 1
    before = manifest_of(
        {"big": big, "gone": np.ones(1), "grown": np.ones(2), "cast": np.ones(2), "same": np.ones(1)}
    )
    after = manifest_of(
        {
            "big": changed,
            "new": np.ones(4),
            "grown": np.ones(3),
            "cast": np.ones(2, np.float32),
            "same": np.ones(1),
        }
    )
    difference = compare(before, after)
    assert (difference.removed, difference.added, difference.same) == (("gone",), ("new",), 1)
    by_name = {c.name: c for c in difference.changed}
    assert sorted(by_name) == ["big", "cast", "grown"]
    assert (by_name["big"].chunks, by_name["big"].of_chunks) == (1, 3)
    assert by_name["big"].changed_bytes == CHUNK_BYTES - 800
    assert (by_name["grown"].chunks, by_name["grown"].before, by_name["grown"].after) == (
        None,
        "float64[2]",
        "float64[3]",
    )
    assert difference.changed_bytes == CHUNK_BYTES - 800 + 24 + 8 + 32
    alike = compare(after, after)
    assert (alike.removed, alike.added, alike.changed, alike.values) == ((), (), (), ())


def test_changed_plain_values_are_reported_by_path() -> None:
    before = manifest_of({"lr": 0.1, "steps": [1, 2], "n": np.float32(1.5), "gone": True})
    after = manifest_of({"lr": 0.2, "steps": [1, 3, 4], "n": np.float32(2.5), "odd": float("inf")})
    assert {v.path: (v.before, v.after) for v in compare(before, after).values} == {
        "lr": ("0.1", "0.2"),
        "steps.1": ("2", "3"),
        "steps.2": (None, "4"),
        "n": ("1.5", "2.5"),
        "gone": ("True", None),
        "odd": (None, "inf"),
    }
