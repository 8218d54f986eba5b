"""`RunConfig`: the settings of `strata run`."""

# ruff: noqa: RUF009  # `setting` returns a dataclass field, as `dataclasses.field` does
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.config.client import COORDINATOR_LOGIN
from strata.config.coordinator import LogConfig
from strata.config.credentials import Credentials
from strata.config.health import HealthConfig
from strata.config.loading import load, read_file, setting
from strata.config.scheduler import allocation
from strata.config.training import PREEMPT_JOB, check_preempt
from strata.config.userinfo import refuse_userinfo
from strata.errors import ConfigError

MAX_SLOTS = 1024
MAX_RUN_ID_CHARS = 256
PROCESS = "process"
IN_PROCESS = "in_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of one agent: a member of a job, with `slots` ranks on this node."""

    endpoints: tuple[str, ...] = setting("endpoints", default=("127.0.0.1:50051",), doc="the coordinators")
    job: str = setting(
        "job",
        default="",
        doc="the job to join, created by its first member; on a single node by default named from its script",
    )
    run_id: str = setting(
        "run.run_id",
        default="",
        doc="the run that this member belongs to, the same for all that are started together",
        env="STRATA_RUN_ID",
    )
    worker_id: str = setting(
        "run.worker_id",
        default="",
        doc="this member's name in the job, by default the host's",
        env="STRATA_WORKER_ID",
    )
    slots: int = setting("run.slots", default=1, doc="ranks to run on this node")
    min_workers: int = setting("run.min_workers", default=1, doc="members the job needs to train")
    max_workers: int = setting(
        "run.max_workers", default=0, doc="members it takes at most; 0: as many as it needs"
    )
    settle_s: float = setting(
        "run.settle_s", default=2.0, doc="how long to wait for more members than it needs"
    )
    max_no_progress_generations: int = setting(
        "run.max_no_progress_generations",
        default=3,
        doc="generations in a row without a committed checkpoint after which the job fails",
    )
    max_generations: int = setting(
        "run.max_generations",
        default=0,
        doc="generations that a failure may end until the job fails; 0: no limit",
    )
    address: str = setting(
        "run.address",
        default="",
        doc="where other nodes reach this one's ranks, by default found by the route out",
        env="STRATA_ADDRESS",
    )
    log_dir: Path | None = setting(
        "run.log_dir",
        default=None,
        doc="a folder for the ranks' output, a file each; the pages of ranks show its last lines",
    )
    tee: bool = setting("run.tee", default=False, doc="show here, too, the output that goes into log_dir")
    prefix: bool = setting(
        "run.prefix",
        default=True,
        doc="show ranks' lines with the rank before each; else ranks write where this command does by themselves",
    )
    timeout_s: float = setting(
        "run.timeout_s", default=300.0, doc="how long to wait for a first coordinator; 0: for ever"
    )
    stop_grace_s: float = setting(
        "run.stop_grace_s", default=30.0, doc="from SIGTERM to SIGKILL when the run is stopped"
    )
    preempt: str = setting(
        "run.preempt",
        default=PREEMPT_JOB,
        doc="members that leave when this one is preempted: all of the job, or this one",
    )
    preempt_grace_s: float = setting(
        "run.preempt_grace_s",
        default=25.0,
        doc="how long ranks have to stop together and to save when the run is preempted",
    )
    restart_grace_s: float = setting(
        "run.restart_grace_s",
        default=2.0,
        doc="from SIGTERM to SIGKILL for ranks of a generation that has ended",
    )
    join_timeout_s: float = setting(
        "run.join_timeout_s",
        default=300.0,
        doc="how long members of a new world wait for each other before it counts as failed",
    )
    restart: str = setting(
        "run.restart",
        default=PROCESS,
        doc="how a rank begins a new generation: process (a new one) or in_process (if its program can)",
    )
    warm: bool = setting(
        "run.warm",
        default=True,
        doc="keep one process per slot that has done the imports of a Python script",
    )
    warm_imports: tuple[str, ...] = setting(
        "run.warm_imports", default=(), doc="modules it imports besides those found in the script"
    )
    warm_after_s: float = setting(
        "run.warm_after_s",
        default=5.0,
        doc="how long new ranks have the node to themselves before the next warm processes start",
    )
    resume: bool = setting(
        "run.resume", default=False, doc="go on with a job that is done, has failed or ran another program"
    )
    new: bool = setting(
        "run.new",
        default=False,
        doc="begin a job that is done, has failed or ran another command from nothing;"
        " its checkpoints are given up, and stay",
    )
    status_line: bool = setting(
        "run.status_line",
        default=True,
        doc="show progress in the terminal's last line, where logs are plain text on a terminal",
    )
    health: HealthConfig = field(default_factory=HealthConfig)
    credentials: Credentials = field(default_factory=Credentials)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("no coordinator is given", hint="set --endpoints host:port,…")
        refuse_userinfo("a coordinator's endpoint", self.endpoints, hint=COORDINATOR_LOGIN)
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ConfigError(f"--slots must be 1 to {MAX_SLOTS}, not {self.slots}")
        if self.min_workers < 1:
            raise ConfigError("--min-workers must be at least 1")
        if self.max_workers and self.max_workers < self.min_workers:
            raise ConfigError(
                f"--max-workers {self.max_workers} is below --min-workers {self.min_workers}",
                hint="under Slurm both are the number of its tasks unless given: give both",
            )
        if self.preempt_grace_s <= 0:
            raise ConfigError("--preempt-grace-s must be above 0", hint="a save needs time")
        for name in ("settle_s", "stop_grace_s", "restart_grace_s", "warm_after_s", "timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} cannot be negative")
        check_preempt("--preempt", self.preempt)
        self._check_output()
        if self.join_timeout_s < 1:
            raise ConfigError("run.join_timeout_s must be at least 1 second")
        if self.max_no_progress_generations < 1:
            raise ConfigError("--max-no-progress-generations must be at least 1")
        if self.restart not in {PROCESS, IN_PROCESS}:
            raise ConfigError(f"--restart must be {PROCESS} or {IN_PROCESS}, not {self.restart!r}")
        if len(self.run_id) > MAX_RUN_ID_CHARS:
            raise ConfigError(f"--run-id has {len(self.run_id)} characters: at most {MAX_RUN_ID_CHARS}")
        if self.new and self.resume:
            raise ConfigError(
                "--new and --resume exclude each other",
                hint="--resume goes on from the latest checkpoint, --new begins from nothing",
            )
        if self.max_generations < 0:
            raise ConfigError("--max-generations cannot be negative")

    def _check_output(self) -> None:
        if self.tee and self.log_dir is None:
            raise ConfigError("--tee needs a folder to write to as well", hint="give --log-dir, too")

    @classmethod
    def load(cls, *, flags: Mapping[str, Any], env: Mapping[str, str], path: Path | None = None) -> RunConfig:
        """Load the configuration from flags, environment and the file at `path` (or a default file).

        A setting that they do not give comes from the scheduler that started this process, if any. Logs are
        plain text unless JSON is configured, since they appear between the ranks' lines.
        """
        body, name = read_file(path)
        found = allocation(env)
        defaults = {"log.format": "plain", **(found.defaults() if found is not None else {})}
        return load(cls, flags=flags, env=env, file=body, file_name=name, defaults=defaults)
