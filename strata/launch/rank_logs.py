"""The files that ranks' output goes to: `generation-000003-rank-00005.log` for each process that is started.

A crashed rank's last lines are wanted when its process is gone, and often when another one has taken its place. So the
newest two files of each rank are remembered, with how their processes ended, for as long as the agent lives.

Nothing removes a file: whose it is, and for how long it is wanted, only its owner knows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from strata.client.inspection import RankLog
from strata.config import RunConfig
from strata.core.ids import checked_id
from strata.errors import ConfigError

REMEMBERED: Final = 2
"""Of each rank: the process that runs or ended last, and the one before it."""


class RankLogs:
    """The files of one job's ranks on this node. Without a folder there are none."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._of: dict[int, tuple[RankLog, ...]] = {}

    @classmethod
    def of_run(cls, config: RunConfig) -> Self:
        """Return those of a run."""
        return cls(config.log_dir / checked_id("job", config.job) if config.log_dir else None)

    def new(self, generation: int, rank: int) -> RankLog | None:
        """Return where a new process's output goes, in a folder that is there; `ConfigError` if that cannot be made."""
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write the ranks' output to {self._folder}: {error}") from error
        return RankLog(
            generation=generation, file=self._folder / f"generation-{generation:06d}-rank-{rank:05d}.log"
        )

    def begun(self, rank: int, log: RankLog | None) -> None:
        """Take note that the process that writes `log` is this rank from now on."""
        if log is not None:
            self._of[rank] = (log, *(each for each in self._of.get(rank, ()) if each.file != log.file))[
                :REMEMBERED
            ]

    def ended(self, rank: int, log: RankLog | None, how: str) -> None:
        """Take note that the process that writes `log` has ended, and how."""
        if log is not None:
            known = self._of.get(rank, ())
            self._of[rank] = tuple(
                replace(each, ended=how) if each.file == log.file else each for each in known
            )

    def of(self, rank: int) -> tuple[RankLog, ...]:
        """Return what is remembered of a rank, the newest first."""
        return self._of.get(rank, ())
