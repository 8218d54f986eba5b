"""An array of which each rank has some boxes, for tests without torch's DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.checkpoint.save.sharding import Box
from strata.checkpoint.snapshot.parts import Distributed, LocalPart
from strata.checkpoint.snapshot.tensors import TensorSpec


class Parted:
    """One rank's part of `whole`: the boxes in which this rank has it."""

    def __init__(self, whole: np.ndarray[Any, Any], boxes: Sequence[Box]) -> None:
        self._whole = whole
        self._boxes = boxes

    def __strata_parts__(self) -> Distributed:
        spec = TensorSpec(kind="numpy", dtype=self._whole.dtype.name, shape=self._whole.shape)
        parts = (
            LocalPart(box=box, value=np.ascontiguousarray(self._whole[box.slices()])) for box in self._boxes
        )
        return Distributed(spec=spec, parts=tuple(parts))


def divided(whole: np.ndarray[Any, Any], ranks: int, *, dimension: int = 0) -> list[Parted]:
    """Return each rank's part of an array that is divided along one dimension, as evenly as possible."""
    found = []
    for rank in range(ranks):
        begin, end = (whole.shape[dimension] * n // ranks for n in (rank, rank + 1))
        offsets, shape = [0] * whole.ndim, list(whole.shape)
        offsets[dimension], shape[dimension] = begin, end - begin
        found.append(Parted(whole, [Box(tuple(offsets), tuple(shape))]))
    return found
