"""Parts of different tensors under one name: pipeline stages whose optimizers number their parameters alike."""

from __future__ import annotations

import numpy as np

from strata.checkpoint.restore.global_tensors import global_tensors
from strata.errors import CheckpointError, StrataError
from tests.unit.checkpoint.parted import divided
from tests.unit.checkpoint.ranks import Ranks

W = np.arange(60, dtype=np.float32).reshape(6, 10)


def test_two_tensors_of_one_name_are_refused_at_the_save() -> None:
    stages = Ranks(4)
    found = stages.save(states=[{"w": part} for whole in (W, W + 1) for part in divided(whole, 2)])
    assert isinstance(found[0], CheckpointError)
    assert "ranks 0 and 2 have different values of the same part of w" in found[0].message
    assert "need names of their own" in found[0].hint
    assert all(isinstance(one, StrataError) for one in found), "nothing is committed"


def test_equal_parts_in_several_groups_of_ranks_are_one_tensor() -> None:
    groups = Ranks(4)
    groups.save(states=[{"w": part} for _ in range(2) for part in divided(W, 2)])
    (found,) = global_tensors([groups.manifest(rank) for rank in range(4)]).values()
    assert [piece.rank for piece in found.pieces] == [0, 1]
