"""A rank's place: from its environment, and the same for a rank that continues in its process."""

from __future__ import annotations

import os

import pytest

from strata.agent.environment import Place, rank_environment
from strata.data.place import DataPlace
from strata.training.world import TrainingWorld, enter_place, world_of
from strata.v1.session_pb2 import RankPlace
from strata.v1.worlds_pb2 import RestorePoint, World, WorldMember
from tests.unit.training.room import Room


def place(generation: int, *, restore: RestorePoint | None) -> Place:
    return Place(
        job="gpt",
        worker_id="node-2",
        world=World(generation=generation, size=8, members=2, restore=restore),
        member=WorldMember(worker_id="node-2", incarnation=9, group_rank=1, slots=4, first_rank=4),
        master_addr=f"192.0.2.{generation}",
        master_port=4000 + generation,
        socket="/run/strata/s",
        endpoints="a:1",
        detect_s=5.0,
        preempt_grace_s=25.0,
    )


def environment(place: Place, restarts: int) -> dict[str, str]:
    return rank_environment(
        place, local_rank=3, inherited={}, restarts=restarts, stacks="/run/x", restart="in_process"
    )


@pytest.mark.parametrize(
    "restore", [None, RestorePoint(step=40, attempt="a", path="file:///c", manifest_digest="d")]
)
def test_a_rank_that_continues_in_process_has_the_environment_of_a_new_one(
    monkeypatch: pytest.MonkeyPatch, restore: RestorePoint | None
) -> None:
    before = environment(place(5, restore=RestorePoint(step=20, attempt="b")), restarts=2)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    new = place(6, restore=restore)
    enter_place(
        RankPlace(
            world=new.world,
            member=new.member,
            local_rank=3,
            master_addr=new.master_addr,
            master_port=new.master_port,
        )
    )
    wanted = environment(new, restarts=3)
    found = {name: os.environ.get(name) for name in before | wanted}
    reported = found.pop("STRATA_RESTORE"), wanted.pop("STRATA_RESTORE", None)
    assert {name: value for name, value in found.items() if value is not None} == wanted
    assert (reported[0] is None) == (reported[1] is None) == (restore is None)
    if reported[0] is not None:
        assert (
            '"step": "40"' in reported[0]
        )  # protobuf's JSON has the number as a string; both forms are read


def test_the_world_has_the_address_where_its_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    alone = world_of(Room(1).rank(0), DataPlace(0, 1))
    assert (alone.size, alone.local_rank, alone.coordinator_address) == (1, 0, "")
    for name, value in environment(place(5, restore=None), restarts=0).items():
        monkeypatch.setenv(name, value)
    found = world_of(Room(2).rank(1), DataPlace(1, 2))
    assert (found.data_rank, found.data_size) == (1, 2)
    assert (found.local_rank, found.local_size) == (3, 4)
    assert found.coordinator_address == "192.0.2.5:4005"
    v6 = TrainingWorld(
        job="j",
        worker_id="w",
        generation=1,
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        data_rank=0,
        data_size=1,
        master_addr="::1",
        master_port=7,
    )
    assert v6.coordinator_address == "[::1]:7"
