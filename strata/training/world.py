"""`TrainingWorld`: which rank of which world this process is, as the trainer is told."""

from __future__ import annotations

import os
from dataclasses import dataclass

from strata.training.peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWorld:
    """One generation, seen by one rank.

    `master_addr` and `master_port` are where its ranks meet, fresh in each generation: for
    `jax.distributed.initialize(f"{w.master_addr}:{w.master_port}", w.size, w.rank)`, say. They are
    empty for a rank that is alone.
    """

    job: str
    worker_id: str
    generation: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str = ""
    master_port: int = 0

    @property
    def coordinator_address(self) -> str:
        """`host:port` of the meeting point; "" when there is none."""
        if not self.master_addr:
            return ""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"{host}:{self.master_port}"


def world_of(peers: Peers) -> TrainingWorld:
    """Return the world of `peers`, with what the environment says of this node."""
    env = os.environ
    supervised = "RANK" in env and "WORLD_SIZE" in env
    return TrainingWorld(
        job=peers.job,
        worker_id=peers.worker_id,
        generation=peers.generation,
        rank=peers.rank,
        size=peers.world_size,
        local_rank=_number(env.get("LOCAL_RANK"), 0),
        local_size=_number(env.get("LOCAL_WORLD_SIZE"), 1),
        master_addr=env.get("MASTER_ADDR", "") if supervised else "",
        master_port=_number(env.get("MASTER_PORT"), 0) if supervised else 0,
    )


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isdigit() else otherwise
