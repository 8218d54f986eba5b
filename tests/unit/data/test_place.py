"""A rank's place among the data-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest

from strata.data.place import DataPlace, check_places, place_of
from strata.errors import ConfigError, InvalidArgument


class Mesh:
    """The parts of torch's DeviceMesh that are read."""

    def __init__(
        self, shape: tuple[int, ...], at: tuple[int, ...] | None, names: tuple[str, ...] | None
    ) -> None:
        self.shape = shape
        self.mesh_dim_names = names
        self._at = at

    def get_coordinate(self) -> list[int] | None:
        return None if self._at is None else list(self._at)


def test_without_a_mesh_each_rank_has_a_place_of_its_own() -> None:
    assert place_of(None, rank=2, world_size=4) == DataPlace(2, 4)


@pytest.mark.parametrize(
    ("mesh", "place"),
    [
        ((1, 2), DataPlace(1, 2)),
        (Mesh((2,), (1,), ("dp",)), DataPlace(1, 2)),
        (Mesh((2, 2), (1, 0), ("dp_replicate", "dp_shard")), DataPlace(2, 4)),
        (Mesh((4,), (3,), None), DataPlace(3, 4)),
        (lambda: (0, 2), DataPlace(0, 2)),
    ],
)
def test_a_mesh_names_the_place(mesh: Any, place: DataPlace) -> None:
    assert place_of(mesh, rank=3, world_size=4) == place


@pytest.mark.parametrize(
    ("mesh", "why"),
    [
        (Mesh((2, 2), (1, 0), ("dp", "tp")), "the ranks along 'tp' of this mesh need the same batch"),
        (Mesh((2,), None, ("dp",)), "rank 3 is not part of this mesh"),
        ((2, 2), "place 2 of 2"),
        ((0, 3), "place 0 of 3 data-parallel ranks in a world of 4"),
        ((0, 2, 1), "not a pair"),
        ((True, 2), "not a pair"),
        ("dp", "mesh is a str"),
    ],
)
def test_a_mesh_that_gives_no_place_is_refused(mesh: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        place_of(mesh, rank=3, world_size=4)


def test_the_ranks_places_must_fit_together() -> None:
    two_by_two = [DataPlace(0, 2), DataPlace(0, 2), DataPlace(1, 2), DataPlace(1, 2)]
    check_places(dict(enumerate(two_by_two)))
    with pytest.raises(ConfigError, match="some have more ranks than others"):
        check_places(dict(enumerate([DataPlace(0, 2), *two_by_two[:3]])))
    with pytest.raises(ConfigError, match="the ranks' meshes have 2 and 4"):
        check_places(dict(enumerate([DataPlace(0, 4), *two_by_two[1:]])))
