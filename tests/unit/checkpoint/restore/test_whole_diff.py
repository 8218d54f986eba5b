from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.restore.whole_diff import Ranks as Manifests
from strata.checkpoint.restore.whole_diff import Values, compare
from tests.unit.checkpoint.parted import divided
from tests.unit.checkpoint.ranks import Ranks

W = np.arange(12, dtype=np.float32).reshape(4, 3)


def values(states: Sequence[Any]) -> list[Values]:
    """Return the values of a checkpoint that ranks with these states have saved."""
    ranks = Ranks(len(states))
    ranks.save(states=states)
    manifests = [ranks.manifest(rank) for rank in range(len(states))]
    read = Manifests(ranks.folder, manifests)
    return [read.values(manifest.tree, rank) for rank, manifest in enumerate(manifests)]


def verdicts(a: Sequence[Any], b: Sequence[Any]) -> dict[str, list[tuple[bool | None, tuple[int, ...]]]]:
    found: dict[str, list[tuple[bool | None, tuple[int, ...]]]] = {}
    for pair in compare(values(a), values(b)):
        found.setdefault(pair.path, []).append((pair.same, pair.ranks))
    return found


def test_values_are_equal_if_all_their_bits_are() -> None:
    a = {"w": W, "lr": 0.1, "zero": 0.0, "nan": np.array([np.nan]), "flag": True, "empty": np.zeros((0, 3))}
    b = {**a, "zero": -0.0, "flag": 1}
    same = {path: each[0][0] for path, each in verdicts([a], [b]).items()}
    assert same == {"w": True, "lr": True, "zero": False, "nan": True, "flag": False, "empty": True}


def test_another_dtype_shape_kind_or_a_missing_value_differs() -> None:
    a = {"dtype": W, "shape": W, "kind": W, "only a": 1}
    b = {"dtype": W.astype(np.float64), "shape": W.T.copy(), "kind": 3, "only b": 1}
    pairs = {pair.path: pair for pair in compare(values([a]), values([b]))}
    assert list(pairs) == ["dtype", "shape", "kind", "only a", "only b"]
    assert {pair.same for pair in pairs.values()} == {False}
    assert [str(pairs["dtype"].a), str(pairs["dtype"].b)] == ["float32[4, 3]", "float64[4, 3]"]
    assert (pairs["only a"].b, pairs["only b"].a) == (None, None)


def test_the_library_that_saved_a_tensor_does_not_matter() -> None:
    torch = pytest.importorskip("torch")
    assert verdicts([{"w": W}], [{"w": torch.from_numpy(W)}]) == {"w": [(True, ())]}


def test_parts_that_are_equal_need_no_reading_and_others_are_undecided() -> None:
    two, again, changed = ([{"w": part} for part in divided(w, 2)] for w in (W, W, W + 1))
    assert verdicts(two, again) == {"w": [(True, ())]}
    assert verdicts(two, changed) == {"w": [(False, ())]}
    three = [{"w": part} for part in divided(W, 3)]
    assert verdicts(two, three) == {"w": [(None, ())]}
    (pair,) = compare(values(two), values(three))
    assert pair.size_bytes == 2 * W.nbytes


def test_a_tensor_in_one_part_equals_the_same_tensor_of_one_rank() -> None:
    alone = [{"w": part} for part in divided(W, 1)]
    assert verdicts(alone, [{"w": W}]) == {"w": [(True, ())]}


def test_values_of_single_ranks_are_compared_by_rank_where_both_worlds_have_it() -> None:
    a = [{"mean": rank, "step": 5} for rank in range(2)]
    b = [{"mean": value, "step": 5} for value in (0, 7, 9)]
    assert verdicts(a, b) == {"mean": [(True, (0,)), (False, (1,))], "step": [(True, ())]}


def test_a_path_with_one_pair_on_all_ranks_is_one_pair() -> None:
    a, b = ([{"w": W + add} for _ in range(3)] for add in (0, 1))
    (pair,) = compare(values(a), values(b))
    assert (pair.same, pair.ranks) == (False, ())


def test_opaque_bytes_are_compared_like_a_tensor() -> None:
    assert verdicts([{"raw": b"abc"}], [{"raw": b"abc"}]) == {"raw": [(True, ())]}
    assert verdicts([{"raw": b"abc"}], [{"raw": b"abd"}]) == {"raw": [(False, ())]}
