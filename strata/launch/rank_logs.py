"""Log files of ranks: `generation-000003-rank-00005.log` for each process that is started.

People need a crashed rank's last lines after its process has ended, often when another process has taken its
place. So the agent remembers the newest two files of each rank for its lifetime, with how their processes
ended.

Strata never removes a log file: only the user knows how long it is needed.

An agent creates a link to the folder, named like the job, in a state folder of its user on this host (`link_of`).
So `strata logs` needs neither the folder's path nor a coordinator.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from strata.client.rank.inspection import RankLog
from strata.config import RunConfig
from strata.core.ids import checked_id
from strata.errors import ConfigError

REMEMBERED: Final = 2
"""Files per rank: those of the newest process and of the process before it."""

_NAME: Final = re.compile(r"generation-(\d+)-rank-(\d+)\.log")


@dataclass(frozen=True, slots=True, order=True)
class LogFile:
    """A file of one rank's output."""

    rank: int
    generation: int
    path: Path
    written_ns: int = field(compare=False)
    """Time of the last write, by the file system's clock."""
    size: int = field(compare=False)


def files_in(folder: Path) -> list[LogFile]:
    """Return the ranks' log files in a job's folder, by rank and generation; none if there is no folder."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is not None:
                with contextlib.suppress(FileNotFoundError):  # removed just now
                    at, size = entry.stat().st_mtime_ns, entry.stat().st_size
                    found.append(LogFile(int(match[2]), int(match[1]), folder / entry.name, at, size))
    return sorted(found)


def newest(files: Iterable[LogFile]) -> dict[int, LogFile]:
    """Return each rank's file with the latest write.

    That file may not have the highest generation: a job that was deleted and created again counts generations from 1.
    """
    found = {each.rank: each for each in sorted(files, key=lambda each: (each.written_ns, each.generation))}
    return dict(sorted(found.items()))


def link_of(job: str, env: Mapping[str, str]) -> Path:
    """Return the path of the link to a job's output folder, for this user on this host."""
    state = env.get("XDG_STATE_HOME") or Path(env.get("HOME") or "~").expanduser() / ".local" / "state"
    return Path(state) / "strata" / "logs" / socket.gethostname() / job  # a home may be shared by hosts


def jobs_here(env: Mapping[str, str]) -> list[str]:
    """Return the names of the links that this user's agents created on this host: jobs with an output folder here."""
    try:
        return sorted(each.name for each in link_of("job", env).parent.iterdir() if each.is_dir())
    except OSError:
        return []


def leave_link(job: str, folder: Path, env: Mapping[str, str]) -> None:
    """Create the link by which `strata logs` finds a job's output folder; if that fails, users must name the folder."""
    link = link_of(job, env)
    new = link.with_name(f".{job}-{os.getpid()}")
    with contextlib.suppress(OSError):
        link.parent.mkdir(parents=True, exist_ok=True)
        new.symlink_to(folder.resolve())
        new.replace(link)


class RankLogs:
    """The log files of one job's ranks on this node. Without a folder there are none."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._of: dict[int, tuple[RankLog, ...]] = {}

    @classmethod
    def of_run(cls, config: RunConfig) -> Self:
        """Return the log files of a run."""
        if config.log_dir is None:
            return cls()
        folder = config.log_dir / checked_id("job", config.job)
        leave_link(config.job, folder, os.environ)
        return cls(folder)

    def new(self, generation: int, rank: int) -> RankLog | None:
        """Create and return the file for a new process's output; `ConfigError` if it cannot be created.

        From now on the file counts as the newest of its rank, even if the process writes nothing for long.
        """
        if self._folder is None:
            return None
        file = self._folder / f"generation-{generation:06d}-rank-{rank:05d}.log"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file.touch()
        except OSError as error:
            raise ConfigError(f"cannot write the ranks' output to {self._folder}: {error}") from error
        return RankLog(generation=generation, file=file)

    def begun(self, rank: int, log: RankLog | None) -> None:
        """Record that the process that writes `log` is this rank from now on."""
        if log is not None:
            self._of[rank] = (log, *(each for each in self._of.get(rank, ()) if each.file != log.file))[
                :REMEMBERED
            ]

    def ended(self, rank: int, log: RankLog | None, how: str) -> None:
        """Record that the process that writes `log` has ended, and how."""
        if log is not None:
            known = self._of.get(rank, ())
            self._of[rank] = tuple(
                replace(each, ended=how) if each.file == log.file else each for each in known
            )

    def of(self, rank: int) -> tuple[RankLog, ...]:
        """Return the remembered files of a rank, the newest first."""
        return self._of.get(rank, ())
