"""What Slurm or Kubernetes says of a run: who this member is, and how many there are.

Nobody has to repeat it: these are the defaults of `strata run` where it is started by one of them,
below flags, our own environment and the file.

Slurm (`srun --ntasks-per-node=1 strata run …`): the job keeps its id when it is requeued, and so
goes on with the same job of ours. Kubernetes (an Indexed Job): a pod's host name is the job's name
and its completion index, and a pod that replaces another has the same index. A pod is not told its Job's
uid: the manifest hands that on as STRATA_RUN_ID (docs/run.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One member's place in what a scheduler started."""

    scheduler: str
    job: str
    worker_id: str
    members: int = 0
    """How many are started together; 0 where that cannot be known."""
    run_id: str = ""
    """The identity of what was started together, a requeued job included; "" where that cannot be known."""
    restarts: int = 0
    """How often the scheduler put the job back into the queue."""

    def defaults(self) -> dict[str, Any]:
        """Return what it sets, by the names of `RunConfig`'s fields."""
        counts = {"min_workers": self.members, "max_workers": self.members} if self.members else {}
        return {"job": self.job, "worker_id": self.worker_id, "run_id": self.run_id, **counts}


def allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Return what the environment says; None when neither of them started this process.

    `ConfigError` for a number that is none: better than to train as somebody else.
    """
    if environment.get("SLURM_JOB_ID"):
        return _slurm(environment)
    if environment.get("JOB_COMPLETION_INDEX"):
        return _kubernetes(environment)
    return None


def run_identity(environment: Mapping[str, str]) -> str:
    """Return what names the run that a member without `strata run` belongs to; "" where nobody can know it.

    STRATA_RUN_ID, else Slurm's job, which keeps its id when it is requeued. torchrun's run id is none: with
    `--standalone` it is a new one whenever that is started again, and a given one is the same in the next run.
    """
    slurms = environment.get("SLURM_JOB_ID")
    return environment.get("STRATA_RUN_ID") or (f"slurm-{slurms}" if slurms else "")


def _slurm(environment: Mapping[str, str]) -> Allocation:
    node = _number(environment, "SLURM_NODEID")
    local = _number(environment, "SLURM_LOCALID")
    # a step of srun says how many tasks it has: one supervisor each; else one a node is meant
    members = _number(environment, "SLURM_STEP_NUM_TASKS") or _number(environment, "SLURM_NNODES")
    return Allocation(
        scheduler="slurm",
        job=f"slurm-{environment['SLURM_JOB_ID']}",
        worker_id=f"node-{node}" if local == 0 else f"node-{node}-{local}",
        members=members,
        run_id=f"slurm-{environment['SLURM_JOB_ID']}",
        restarts=_number(environment, "SLURM_RESTART_COUNT"),
    )


def _kubernetes(environment: Mapping[str, str]) -> Allocation | None:
    index = _number(environment, "JOB_COMPLETION_INDEX")
    pod = environment.get("HOSTNAME", "")
    # the host name of an indexed pod is <job>-<index>, its own name has five more characters
    found = re.fullmatch(rf"(?P<job>.+)-{index}(-[a-z0-9]{{5}})?", pod)
    if found is None:
        return None
    return Allocation(scheduler="kubernetes", job=found["job"], worker_id=f"pod-{index}")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name) or "0"
    if not text.isdecimal() or len(text) > 18:
        raise ConfigError(f"{name} is {text[:100]!r}, not a number", hint="it is set by the scheduler")
    return int(text)
