"""`DataPlace`: a rank's place among the data-parallel ranks.

Samples belong to data-parallel ranks. Ranks that hold parts of one replica of the model (tensor- and pipeline-parallel
peers) have the same place, and get the same batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strata.errors import ConfigError, InvalidArgument

_MODEL_PARALLEL: Final = frozenset(
    {"tp", "pp", "cp", "sp", "ep", "etp", "tensor", "pipeline", "context", "expert", "model"}
)
"""Usual names of a mesh's dimensions whose ranks need the same batch."""
_HINT: Final = 'pass the data-parallel part of the mesh: strata.init(mesh=mesh["dp"]), or mesh=(index, count)'


@dataclass(frozen=True, slots=True)
class DataPlace:
    """The place `rank` of `size` data-parallel ranks."""

    rank: int
    size: int


def place_of(mesh: Any, *, rank: int, world_size: int) -> DataPlace:
    """Return the place that `mesh` gives this rank; without a mesh each rank has a place of its own.

    `mesh` is the data-parallel part of a torch DeviceMesh (of one or several dimensions), a pair (index, count) of
    numbers, or a function that returns one of these.
    """
    if callable(mesh):
        mesh = mesh()
    if mesh is None:
        return DataPlace(rank, world_size)
    if isinstance(mesh, tuple):
        return _checked(mesh, world_size)
    if not (hasattr(mesh, "get_coordinate") and hasattr(mesh, "shape")):
        raise InvalidArgument(f"mesh is a {type(mesh).__name__}, not a DeviceMesh", hint=_HINT)
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if peers := [name for name in names if str(name).lower() in _MODEL_PARALLEL]:
        raise InvalidArgument(f"the ranks along {peers[0]!r} of this mesh need the same batch", hint=_HINT)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise InvalidArgument(f"rank {rank} is not part of this mesh", hint=_HINT)
    shape = tuple(mesh.shape)
    index = 0
    for at, count in zip(coordinate, shape, strict=True):
        index = index * count + at
    return _checked((index, math.prod(shape)), world_size)


def _checked(mesh: tuple[Any, ...], world_size: int) -> DataPlace:
    if len(mesh) != 2 or not all(isinstance(one, int) and not isinstance(one, bool) for one in mesh):
        raise InvalidArgument(f"mesh is {mesh!r}, not a pair of numbers", hint=_HINT)
    index, count = mesh
    if not 0 <= index < count or world_size % count:
        raise InvalidArgument(
            f"mesh gives the place {index} of {count} data-parallel ranks in a world of {world_size}",
            hint="the number of data-parallel ranks divides the world's size, and places count from 0",
        )
    return DataPlace(index, count)


def check_places(places: Mapping[int, DataPlace]) -> None:
    """Raise `ConfigError` unless all ranks name the same number of places, and each place has equally many ranks."""
    sizes = {place.size for place in places.values()}
    if len(sizes) > 1:
        raise ConfigError(
            f"the ranks' meshes have {' and '.join(map(str, sorted(sizes)))} data-parallel ranks",
            hint="give all ranks the same mesh",
        )
    counts = Counter(place.rank for place in places.values())
    (size,) = sizes
    if any(counts[index] * size != len(places) for index in range(size)):
        raise ConfigError(
            f"of {size} data-parallel places some have more ranks than others: {dict(sorted(counts.items()))}",
            hint="give all ranks the same mesh",
        )
