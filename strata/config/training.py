"""`TrainingConfig`: the settings of a training that uses `strata.init`."""

# `setting` returns a dataclass field, as `dataclasses.field` does
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strata.config.loading import load, read_file, setting
from strata.errors import ConfigError

TRAINING_VARIABLES: Final = "STRATA_TRAIN_"
"""The prefix of these settings' environment variables, which `strata run` passes on to its ranks."""
PREEMPT_JOB: Final = "job"
PREEMPT_MEMBER: Final = "member"
MAX_GRACE_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """When and where a training saves, and how it is preempted. `save_every_steps` and `save_every_s` cannot
    both be set.
    """

    storage: str = setting(
        "train.storage",
        default=".strata/checkpoints",
        doc="where the checkpoints lie: a folder that all hosts share, or s3://bucket/prefix",
    )
    replica: str = setting(
        "train.replica",
        default="",
        doc="a second storage, which gets each checkpoint after its commit; empty: none",
    )
    save_every_steps: int = setting(
        "train.save_every_steps", default=0, doc="save after this many steps; 0: another rule decides"
    )
    save_every_s: float = setting(
        "train.save_every_s",
        default=0.0,
        doc="save after this many seconds; 0: by the cost of a save and the job's failure rate",
    )
    full_every: int = setting(
        "train.full_every",
        default=1,
        doc="one in this many saves is full, the others hold only changes; 0: all hold only changes",
    )
    keep_count: int = setting(
        "train.keep_count", default=3, doc="committed checkpoints that stay; 0: all of them"
    )
    save_wait_s: float = setting(
        "train.save_wait_s", default=60.0, doc="how long a due save waits while no coordinator answers"
    )
    save_grace_s: float = setting(
        "train.save_grace_s",
        default=900.0,
        doc="how long the training goes on while the storage refuses its saves; then the job stops with 75",
    )

    preempt: str = setting(
        "train.preempt",
        default=PREEMPT_JOB,
        doc="members that leave on a signal: all of the job, or this one",
    )
    preempt_grace_s: float = setting(
        "train.preempt_grace_s",
        default=25.0,
        doc="from a signal to the end: a save that takes longer is skipped",
    )

    def __post_init__(self) -> None:
        if self.save_every_steps < 0 or self.save_every_s < 0:
            raise ConfigError("train.save_every_steps and train.save_every_s cannot be negative")
        if self.save_every_steps and self.save_every_s:
            raise ConfigError(
                "train.save_every_steps and train.save_every_s are two rules for one thing",
                hint="set one of them, or neither",
            )
        if self.full_every < 0:
            raise ConfigError("train.full_every cannot be negative", hint="1 saves everything each time")
        if self.keep_count < 0:
            raise ConfigError("train.keep_count cannot be negative", hint="0 keeps all checkpoints")
        if self.save_wait_s <= 0:
            raise ConfigError("train.save_wait_s must be above 0")
        if not 0 <= self.save_grace_s <= MAX_GRACE_S:
            raise ConfigError(f"train.save_grace_s must be at least 0, and {MAX_GRACE_S:g} seconds at most")
        check_preempt("train.preempt", self.preempt)
        if not 0 < self.preempt_grace_s <= MAX_GRACE_S:
            raise ConfigError(f"train.preempt_grace_s must be above 0, and {MAX_GRACE_S:g} seconds at most")

    @classmethod
    def load(
        cls, *, flags: Mapping[str, Any] | None = None, env: Mapping[str, str], path: Path | None = None
    ) -> TrainingConfig:
        """Load the configuration from arguments, environment and the file at `path` (or a default file)."""
        body, name = read_file(path)
        return load(cls, flags=flags, env=env, file=body, file_name=name)


def check_preempt(name: str, value: str) -> None:
    """Raise `ConfigError` unless `value` is a preemption mode: which members leave after a signal."""
    if value not in {PREEMPT_JOB, PREEMPT_MEMBER}:
        raise ConfigError(
            f"{name} is {value!r}", hint=f"{PREEMPT_JOB}: all leave; {PREEMPT_MEMBER}: the others go on"
        )
