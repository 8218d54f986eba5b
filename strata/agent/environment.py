"""The environment of a rank's process: torchrun's variables, and Strata's.

The names are torchrun's, so that a script written for torchrun runs unchanged under `strata run`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from strata.config.training import PREEMPT_JOB, TRAINING_VARIABLES
from strata.v1.worlds_pb2 import World, WorldMember

OURS = "STRATA_"
PUBLIC = frozenset({"STRATA_INSECURE", "STRATA_TLS_CA_FILE"})
"""The credential settings of the agent that a rank inherits: none of them proves an identity."""


def is_inherited(name: str) -> bool:
    """Tell whether a rank inherits this variable: any variable of other programs, and a few of Strata's own."""
    return not name.startswith(OURS) or name in PUBLIC or name.startswith(TRAINING_VARIABLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A member's place in one generation: its ranks, and the address of their rendezvous."""

    job: str
    worker_id: str
    world: World
    member: WorldMember
    master_addr: str
    master_port: int
    socket: str
    endpoints: str
    detect_s: float
    preempt: str = PREEMPT_JOB
    preempt_grace_s: float = 25.0

    @property
    def generation(self) -> int:
        return self.world.generation

    @property
    def ranks(self) -> range:
        """The global ranks that this member runs."""
        return range(self.member.first_rank, self.member.first_rank + self.member.slots)


def common_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables common to all ranks of all generations.

    Thread pools get one thread unless the user set them, because the ranks of a node share its cores.
    """
    environment = {k: v for k, v in inherited.items() if is_inherited(k)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # for a script that makes unary calls
    return environment


def rank_environment(
    place: Place, *, local_rank: int, inherited: Mapping[str, str], restarts: int, stacks: str, restart: str
) -> dict[str, str]:
    """Return the whole environment of one rank's process.

    `restarts` counts the generations that this agent started before. `stacks` is the file into which the process
    writes the stacks of its threads on request. `restart` says whether the rank may continue in a newer generation
    without a new process (`in_process`).
    """
    environment = common_environment(inherited)
    rank = place.member.first_rank + local_rank
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(place.world.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(place.member.slots),
        "GROUP_RANK": str(place.member.group_rank),
        "GROUP_WORLD_SIZE": str(place.world.members),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(place.world.size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RUN_ID": place.job,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "STRATA_JOB": place.job,
        "STRATA_WORKER_ID": place.worker_id,
        "STRATA_INCARNATION": str(place.member.incarnation),
        "STRATA_GENERATION": str(place.generation),
        "STRATA_SOCKET": place.socket,
        "STRATA_ENDPOINTS": place.endpoints,
        "STRATA_DETECT_S": str(place.detect_s),
        "STRATA_TRAIN_PREEMPT": place.preempt,
        "STRATA_TRAIN_PREEMPT_GRACE_S": str(place.preempt_grace_s),
        "STRATA_STACKS": stacks,
        "STRATA_RESTART": restart,
    }
    if place.world.HasField("restore"):
        restore = place.world.restore
        environment["STRATA_RESTORE"] = json.dumps(
            {
                "step": restore.step,
                "attempt": restore.attempt,
                "record_generation": restore.record_generation,
                "path": restore.path,
                "manifest_digest": restore.manifest_digest,
            }
        )
    return environment
