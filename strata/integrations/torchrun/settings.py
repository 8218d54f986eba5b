"""The settings of a torchrun agent: torchrun's own options, and those of `--rdzv-conf`.

    torchrun --rdzv-backend=strata --rdzv-endpoint=a:1,b:2,c:3 --rdzv-id=gpt --max-restarts=10 \
        --nnodes=2:4 --nproc-per-node=8 --rdzv-conf=settle_s=5,worker_id=node-7 train.py

The run id is the job's name. `--max-restarts` cannot be 0: an agent also restarts its workers if another agent's worker
failed, and torchrun counts that restart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from strata.config import Credentials, TrainingConfig
from strata.config.scheduler import run_identity
from strata.config.training import MAX_GRACE_S, check_preempt
from strata.core.ids import checked_id
from strata.errors import ConfigError, StrataError
from strata.integrations.torchrun.launcher import Launch, Workers
from strata.session.endpoints import Endpoint, parse_endpoints

NO_BREAKER: Final = 1_000_000
"""The default limit of consecutive generations without progress (a committed checkpoint): practically none. In a
torchrun job `--max-restarts` is the limit, and the script may save without Strata."""

OURS: Final = frozenset(
    {
        "attempt",
        "join_timeout",
        "last_call_timeout",
        "max_no_progress_generations",
        "preempt",
        "preempt_grace_s",
        "settle_s",
        "slots",
        "worker_id",
    }
)
TORCHS: Final = frozenset(
    {
        "close_timeout",
        "heartbeat_timeout",
        "is_host",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "rank",
        "read_timeout",
        "store_type",
        "timeout",
        "use_libuv",
    }
)
"""Options that torch sets itself, or that its own backends take: accepted and ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The settings of one agent: a member, with `slots` workers, of the job named by the run id."""

    run_id: str
    endpoints: tuple[Endpoint, ...]
    credentials: Credentials
    worker_id: str
    host: str
    pid: int
    slots: int
    slots_given: bool = False
    """Whether `--rdzv-conf` or torch's launcher has given the number of workers."""
    role: str
    min_nodes: int
    max_nodes: int
    settle_s: float
    max_no_progress_generations: int
    attempt: int
    join_timeout_s: float
    """How long the agent, while connected, waits for enough other agents."""
    preempt: str
    """Which members leave if this agent or one of its workers gets a signal: all of the job's, or only this one."""
    preempt_grace_s: float
    """How long the workers may take after that signal to save a common step."""
    scheduled_run: str = ""
    """The scheduler's run that this agent belongs to; "" if unknown. A run id may be reused by another run."""
    local_addr: str
    """The address at which other nodes reach this node; "": determined from the route to a coordinator."""


def read_settings(
    *,
    run_id: str,
    endpoint: str,
    min_nodes: int,
    max_nodes: int,
    local_addr: str | None,
    conf: Mapping[str, Any],
    launch: Launch | None,
    env: Mapping[str, str],
    host: str,
    pid: int,
    credentials: Credentials,
    training: TrainingConfig,
) -> AgentSettings:
    """Return the settings of an agent; `ConfigError` names the setting that cannot work.

    `training` is the workers' configuration from environment and file; its preemption settings apply to the agent too.
    """
    _check_run_id(run_id)
    if launch is not None and launch.max_restarts < 1:
        raise ConfigError(
            "--max-restarts is 0: the first failure of any worker would end every agent for good",
            hint="pass --max-restarts 10, for example: an agent also counts restarts that another's failure causes",
        )
    unknown = sorted(set(conf) - OURS - TORCHS)
    if unknown:
        raise ConfigError(
            f"--rdzv-conf has no {', '.join(unknown)}", hint=f"it takes {', '.join(sorted(OURS))}"
        )
    where = endpoint or env.get("STRATA_ENDPOINTS", "")
    if not where:
        raise ConfigError(
            "torchrun knows no coordinator",
            hint="give --rdzv-endpoint=host1:50051,host2:50051,host3:50051",
        )
    slots = _number(conf, "slots", launch.slots if launch is not None else 1, least=1)
    if launch is not None and slots != launch.slots:
        raise ConfigError(
            f"slots = {slots}, but the agent runs {launch.slots} workers",
            hint="leave slots out of --rdzv-conf",
        )
    worker = conf.get("worker_id") or env.get("STRATA_WORKER_ID") or own_name(host, pid)
    settle_s = _seconds(conf, "settle_s", _seconds(conf, "last_call_timeout", 2.0))
    preempt = str(conf.get("preempt") or env.get("STRATA_RUN_PREEMPT") or training.preempt)
    check_preempt("preempt", preempt)
    grace_s = env.get("STRATA_RUN_PREEMPT_GRACE_S") or training.preempt_grace_s
    grace_s = _seconds({"preempt_grace_s": grace_s, **conf}, "preempt_grace_s", training.preempt_grace_s)
    if not 0 < grace_s <= MAX_GRACE_S:
        raise ConfigError(f"preempt_grace_s = {grace_s:g} must be above 0, and {MAX_GRACE_S:g} at most")
    attempt = conf.get("attempt", env.get("SLURM_RESTART_COUNT") or 0)
    return AgentSettings(
        run_id=run_id,
        endpoints=parse_endpoints(where, credentials),
        credentials=credentials,
        worker_id=checked_id("worker", str(worker)),
        host=host,
        pid=pid,
        slots=slots,
        slots_given=launch is not None or "slots" in conf,
        role=launch.role if launch is not None else "default",
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        settle_s=settle_s,
        max_no_progress_generations=_number(conf, "max_no_progress_generations", NO_BREAKER, least=1),
        attempt=_number({"attempt": attempt}, "attempt", 0, least=0),
        join_timeout_s=_seconds(conf, "join_timeout", 600.0),
        preempt=preempt,
        preempt_grace_s=grace_s,
        scheduled_run=run_identity(env),
        local_addr=local_addr or env.get("STRATA_ADDRESS", ""),
    )


def of_agent(settings: AgentSettings, workers: Workers | None) -> AgentSettings:
    """Return the settings with the role and the number of workers of the agent's own specification.

    A program that makes a `LocalElasticAgent` gives these values only there. `ConfigError` if `--rdzv-conf` has another
    number.
    """
    if workers is None:
        return settings
    if settings.slots_given and settings.slots != workers.slots:
        raise ConfigError(
            f"slots = {settings.slots}, but the agent runs {workers.slots} workers",
            hint="leave slots out of --rdzv-conf",
        )
    return replace(settings, slots=workers.slots, role=workers.role)


def own_name(host: str, pid: int) -> str:
    """Return a worker id that no other agent of this host uses."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', host)[:100].lstrip('._-') or 'host'}-{pid}"


def _check_run_id(run_id: str) -> None:
    if run_id == "none":
        raise ConfigError(
            "the run id is torchrun's default, none: two trainings would share it",
            hint="give each training a name: --rdzv-id=NAME",
        )
    try:
        checked_id("job", run_id)
    except StrataError as error:
        raise ConfigError(f"--rdzv-id is the job's name: {error.message}", hint=error.hint) from None


def _number(conf: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    value = conf.get(name, default)
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} = {value!r} is not a number") from None
    if not least <= number < 2**31:
        raise ConfigError(f"{name} = {number} is not {least} or more")
    return number


def _seconds(conf: Mapping[str, Any], name: str, default: float) -> float:
    value = conf.get(name, default)
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} = {value!r} is not a number of seconds") from None
    if not 0 <= seconds < 1e7:
        raise ConfigError(f"{name} = {value} is not a number of seconds")
    return seconds
