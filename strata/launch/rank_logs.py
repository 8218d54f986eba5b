"""The files that ranks' output goes to: `generation-000003-rank-00005.log` for each process that is started.

A crashed rank's last lines are wanted when its process is gone, and often when another one has taken its place. So the
newest two files of each rank are remembered, with how their processes ended, for as long as the agent lives.

A new generation begins when every process of the ones before has ended, on all nodes; so files of long-ended
generations are nobody's any more, and whichever agent comes first removes them from a folder that several share.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from strata.client.inspection import RankLog
from strata.config import RunConfig
from strata.config.run import IN_PROCESS
from strata.core.ids import checked_id
from strata.errors import ConfigError
from strata.observe import get_logger

log = get_logger()

REMEMBERED: Final = 2
"""Of each rank: the process that runs or ended last, and the one before it."""
_NAME: Final = re.compile(r"generation-(\d{6,})-rank-\d{5,}\.log")


class RankLogs:
    """The files of one job's ranks on this node. Without a folder there are none."""

    def __init__(self, folder: Path | None = None, *, keep: int = 0) -> None:
        """`keep`: files of so many generations stay, the newest included; 0: all."""
        self._folder = folder
        self._keep = keep
        self._of: dict[int, tuple[RankLog, ...]] = {}

    @classmethod
    def of_run(cls, config: RunConfig) -> Self:
        """Return those of a run. Where processes outlive generations, so do their files: none is removed there."""
        folder = config.log_dir / checked_id("job", config.job) if config.log_dir else None
        return cls(folder, keep=0 if config.restart == IN_PROCESS else config.log_generations)

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

    def remove_old(self, generation: int) -> None:
        """Remove the files of generations that are no longer kept, now that this one has begun. Blocks; never raises."""
        if self._folder is None or not self._keep:
            return
        try:
            for file in self._folder.iterdir():
                name = _NAME.fullmatch(file.name)
                if name is not None and int(name[1]) <= generation - self._keep:
                    file.unlink(missing_ok=True)  # another agent may have been quicker
        except OSError as error:
            log.warning("rank_logs.not_removed", reason=str(error))
