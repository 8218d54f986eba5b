"""The registration that a member sends, and its validation independent of the cluster's state."""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.core.ids import BootId, WorkerId, checked_id
from strata.core.kv.records import Command, JobSpec
from strata.errors import InvalidArgument

MAX_SLOTS = 1024
MAX_WORKERS = 10_000
MAX_RUN_ID_CHARS = 256
MAX_COMMAND_CHARS = 8192
DEFAULT_JOB = "default"
"""The job of a heartbeat that names no job."""
BARE_BOOT = BootId("heartbeat")
"""The boot of a worker whose heartbeats name no boot: its name alone identifies it, even after a restart."""
UNLIMITED = 1_000_000
"""A limit of generations without progress that no job reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A member's data at registration.

    `spec`: the job's limits. They apply if this registration creates the job, or takes the job up without `resume`.
    `incarnation`: the incarnation that an earlier session of this boot got; 0 at first. A process that sends an
    incarnation is never taken for a newcomer. `resume`: a new process may take up a finished job; a reconnect never
    does. `anew`: as `resume`, but the job begins from nothing. Its checkpoints stay in storage, but no world begins
    from them. `attempt`: the launcher's count of attempts at the job. If `attempt` is above the attempt in which
    the job ended, the registration takes the job up. The first member of an attempt sets the job's limits. A paused
    job stays paused. `cannot_restart`: nothing starts the member again after a generation in which it trained.
    `command`: the command of its ranks; None to skip the comparison. `run_id`: its run, "" if unknown (see
    `core.members.admission`). `sole`: the job's name was made for this member alone, so any other member in the job
    belongs to another run.
    """

    worker: WorkerId
    boot: BootId
    host: str = ""
    slots: int = 1
    devices: tuple[str, ...] = ()
    pid: int = 0
    spec: JobSpec = field(default_factory=JobSpec)
    incarnation: int = 0
    resume: bool = False
    attempt: int = 0
    anew: bool = False
    cannot_restart: bool = False
    command: Command | None = None
    run_id: str = ""
    sole: bool = False


def check_registration(registration: Registration) -> None:
    """Raise `InvalidArgument` if no state of the cluster could accept the registration."""
    checked_id("worker", registration.worker)
    checked_id("boot", registration.boot)
    if not 1 <= registration.slots <= MAX_SLOTS:
        raise InvalidArgument(
            f"{registration.slots} slots: a member has 1 to {MAX_SLOTS}",
            hint="slots is the number of ranks that this member runs",
        )
    if registration.attempt < 0:
        raise InvalidArgument(f"attempt = {registration.attempt} is below 0")
    if len(registration.run_id) > MAX_RUN_ID_CHARS:
        raise InvalidArgument(
            f"a run id of {len(registration.run_id)} characters", hint=f"give at most {MAX_RUN_ID_CHARS}"
        )
    if registration.command is not None and len(registration.command.text) > MAX_COMMAND_CHARS:
        raise InvalidArgument(
            f"a command of {len(registration.command.text)} characters",
            hint=f"a registration names at most {MAX_COMMAND_CHARS}; the digest stands for the rest",
        )
    check_spec(registration.spec)


def bare_registration(worker: WorkerId) -> Registration:
    """Return the registration for a bare heartbeat: one slot, in a job that takes every such worker.

    The job may be something else than a training, so the job never fails for lack of checkpoints.
    """
    spec = JobSpec(min_workers=1, max_workers=MAX_WORKERS, max_no_progress_generations=UNLIMITED)
    return Registration(worker=worker, boot=BARE_BOOT, spec=spec)


def check_spec(spec: JobSpec) -> None:
    """Raise `InvalidArgument` unless the limits make sense together."""
    if not 1 <= spec.min_workers <= spec.max_workers <= MAX_WORKERS:
        raise InvalidArgument(
            f"min_workers = {spec.min_workers}, max_workers = {spec.max_workers}: they must be"
            f" 1 <= min <= max <= {MAX_WORKERS}",
            hint="both count members (one strata run a node), not ranks",
        )
    if not 0 <= spec.settle_s <= 3600:
        raise InvalidArgument(f"settle_s = {spec.settle_s:g} is not in 0 .. 3600")
    if spec.max_no_progress_generations < 1:
        raise InvalidArgument(f"max_no_progress_generations = {spec.max_no_progress_generations} is below 1")
    if spec.max_generations < 0:
        raise InvalidArgument(
            f"max_generations = {spec.max_generations} is below 0",
            hint="0 sets no limit, 1 allows no restart",
        )
