"""`TrainingWorld`: the world, rank and rendezvous address of this process, for the user's training code."""

from __future__ import annotations

import os
from dataclasses import dataclass

from google.protobuf import json_format

from strata.data.place import DataPlace
from strata.training.rank_context import RankContext
from strata.v1.session_pb2 import RankPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWorld:
    """One generation, as seen by one rank.

    `master_addr` and `master_port` are the rendezvous address of its ranks, new in each generation: use it for
    `jax.distributed.initialize(f"{w.master_addr}:{w.master_port}", w.size, w.rank)`, for example. A rank that
    trains alone has "" and 0.
    """

    job: str
    worker_id: str
    generation: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    data_rank: int
    """This rank's place among the `data_size` data-parallel ranks, by the `mesh` of `strata.init`."""
    data_size: int
    master_addr: str = ""
    master_port: int = 0

    @property
    def coordinator_address(self) -> str:
        """`host:port` of the rendezvous address; "" if there is none."""
        if not self.master_addr:
            return ""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"{host}:{self.master_port}"


def world_of(context: RankContext, place: DataPlace) -> TrainingWorld:
    """Return the world of `context`, with the node's values from the environment (LOCAL_RANK, MASTER_ADDR …)."""
    env = os.environ
    has_agent = "RANK" in env and "WORLD_SIZE" in env
    return TrainingWorld(
        job=context.job,
        worker_id=context.worker_id,
        generation=context.generation,
        rank=context.rank,
        size=context.world_size,
        local_rank=_number(env.get("LOCAL_RANK"), 0),
        local_size=_number(env.get("LOCAL_WORLD_SIZE"), 1),
        data_rank=place.rank,
        data_size=place.size,
        master_addr=env.get("MASTER_ADDR", "") if has_agent else "",
        master_port=_number(env.get("MASTER_PORT"), 0) if has_agent else 0,
    )


def enter_place(place: RankPlace) -> None:
    """Set this process's environment as the agent sets it for a new process in `place`."""
    world, member = place.world, place.member
    rank = member.first_rank + place.local_rank
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(member.slots),
            "GROUP_RANK": str(member.group_rank),
            "GROUP_WORLD_SIZE": str(world.members),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(world.size),
            "MASTER_ADDR": place.master_addr,
            "MASTER_PORT": str(place.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(_number(os.environ.get("TORCHELASTIC_RESTART_COUNT"), 0) + 1),
            "STRATA_INCARNATION": str(member.incarnation),
            "STRATA_GENERATION": str(world.generation),
        }
    )
    os.environ.pop("STRATA_RESTORE", None)
    if world.HasField("restore"):
        os.environ["STRATA_RESTORE"] = json_format.MessageToJson(
            world.restore, preserving_proto_field_name=True, indent=None
        )


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isdigit() else otherwise
