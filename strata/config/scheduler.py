"""Defaults of `strata run` from Slurm or Kubernetes: the job, this member's id, the number of members.

If Slurm or Kubernetes started `strata run`, its values are defaults. Flags, STRATA_* variables and the file override
them.

Slurm (`srun --ntasks-per-node=1 strata run …`): a requeued Slurm job keeps its id, and so continues the same Strata
job. Kubernetes (an Indexed Job): a pod's host name is the Job's name and its completion index, and a pod that
replaces another has the same index. A pod does not know its Job's uid: the manifest passes it as STRATA_RUN_ID
(docs/run.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A scheduler's facts about one member and its run."""

    scheduler: str
    job: str
    worker_id: str
    members: int = 0
    """The number of members started together; 0 if unknown."""
    run_id: str = ""
    """The identity of the run, the same for a requeued job; "" if unknown."""
    restarts: int = 0
    """How often the scheduler has requeued the job."""

    def defaults(self) -> dict[str, Any]:
        """Return the allocation's settings by the names of `RunConfig`'s fields."""
        counts = {"min_workers": self.members, "max_workers": self.members} if self.members else {}
        return {"job": self.job, "worker_id": self.worker_id, "run_id": self.run_id, **counts}


def allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Return the scheduler's allocation from the environment; None if neither scheduler started this process.

    Raise `ConfigError` for an invalid number: a guess could give this process the id of another member.
    """
    if environment.get("SLURM_JOB_ID"):
        return _slurm(environment)
    if environment.get("JOB_COMPLETION_INDEX"):
        return _kubernetes(environment)
    return None


def run_identity(environment: Mapping[str, str]) -> str:
    """Return the id of the run that a member without `strata run` belongs to; "" if unknown.

    The id is STRATA_RUN_ID, else the id of the Slurm job, which a requeued job keeps. torchrun's run id is not
    suitable: with `--standalone` each start has a new run id, and a run id that the user gives is reused in the next
    run.
    """
    slurms = environment.get("SLURM_JOB_ID")
    return environment.get("STRATA_RUN_ID") or (f"slurm-{slurms}" if slurms else "")


def _slurm(environment: Mapping[str, str]) -> Allocation:
    node = _number(environment, "SLURM_NODEID")
    local = _number(environment, "SLURM_LOCALID")
    # each task of an srun step is an agent; without a step, assume one agent on each node
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
    # the host name of an indexed pod is <job>-<index>; the pod's own name has a suffix of five characters
    found = re.fullmatch(rf"(?P<job>.+)-{index}(-[a-z0-9]{{5}})?", pod)
    if found is None:
        return None
    return Allocation(scheduler="kubernetes", job=found["job"], worker_id=f"pod-{index}")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name) or "0"
    if not text.isdecimal() or len(text) > 18:
        raise ConfigError(f"{name} is {text[:100]!r}, not a number", hint="it is set by the scheduler")
    return int(text)
