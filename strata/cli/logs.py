"""`strata logs`: output of a job's ranks on this host, which `strata run --log-dir` writes to files."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import typer

from strata.cli.console.interrupts import INTERRUPTED
from strata.cli.jobs.named_job import one_name
from strata.config import RunConfig
from strata.core.ids import checked_id
from strata.core.words import ranks_text
from strata.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from strata.launch.console import Console
    from strata.launch.rank_logs import LogFile

POLL_S: Final = 0.25
FOLLOWED_LINES: Final = 10
READ_BYTES: Final = 64 << 10


def logs(
    job_: Annotated[str | None, typer.Argument(metavar="[JOB]", help="The job. (STRATA_JOB)")] = None,
    job: Annotated[str | None, typer.Option("--job", "-j", help="The same.")] = None,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", min=0, help="Of this rank only; may be given again. (all)")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new output, until Ctrl-C.")] = False,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", min=0, help="The last lines of each rank. (all; with --follow 10)"),
    ] = None,
    generation: Annotated[
        int | None, typer.Option("--generation", help="Of this generation. (each rank's newest)")
    ] = None,
    prefix: Annotated[
        bool | None,
        typer.Option("--prefix/--no-prefix", help="Put the rank before each line. (for several ranks)"),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            help="The folder given to strata run. (STRATA_RUN_LOG_DIR, else as the last run on this host)",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file.")] = None,
) -> None:
    """Show what a job's ranks on this host wrote, if strata run had --log-dir. Contacts no coordinator.

    Example: strata logs gpt --rank 3 --follow
    """
    from strata.launch.console import STDOUT, Console  # noqa: PLC0415

    job_name = one_name(job_, job) or os.environ.get("STRATA_JOB")
    if not job_name:
        raise ConfigError("no job is named", hint="strata logs JOB")
    folder = _folder(checked_id("job", job_name), log_dir, config)
    shown = _Shown(
        folder,
        Console(STDOUT, os.environ),
        ranks=frozenset(rank or ()),
        generation=generation,
        prefix=prefix if prefix is not None else len(rank or ()) != 1,
    )
    if not shown.files() and not follow:
        raise _nothing(shown, job_name, folder)
    for line in shown.generations():
        typer.echo(line, err=True)
    shown.show(lines if lines is not None or not follow else FOLLOWED_LINES)
    if follow:
        try:
            while shown.follow():
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _folder(job: str, log_dir: Path | None, config: Path | None) -> Path:
    """Return the folder of a job's output: the configured folder, else the target of the agent's link."""
    from strata.launch.rank_logs import jobs_here, link_of  # noqa: PLC0415

    given = RunConfig.load(flags={"log_dir": log_dir}, env=os.environ, path=config).log_dir
    folder = given / job if given is not None else link_of(job, os.environ)
    if folder.is_dir():
        return folder.resolve()
    if given is not None:
        raise NotFound(
            f"there is no folder {folder}", hint="give strata run and strata logs the same --log-dir"
        )
    others = ", ".join(jobs_here(os.environ))
    raise NotFound(
        f"no ranks of job {job} have written files on this host, as this user"
        + (f"; those of {others} have" if others else ""),
        hint="pass --log-dir DIR to strata run; if it had one, pass the same here",
    )


def _nothing(shown: _Shown, job: str, folder: Path) -> NotFound:
    from strata.launch.rank_logs import files_in  # noqa: PLC0415

    here = sorted({each.rank for each in files_in(folder)})
    ranks = f"it has ranks {', '.join(map(str, here))}" if here else "no rank has begun to write"
    return NotFound(f"{folder} has no such output of job {job}", hint=f"{ranks}: strata logs {job}")


class _Shown:
    """The files of the selected ranks, and how far each file has been shown."""

    def __init__(
        self, folder: Path, console: Console, *, ranks: frozenset[int], generation: int | None, prefix: bool
    ) -> None:
        self._folder = folder
        self._console = console
        self._ranks = ranks
        self._generation = generation
        self._prefix = prefix
        self._open: dict[int, _Open] = {}
        self._known: dict[Path, int] = {}
        """The position up to which each closed file has been shown: `follow` continues there."""

    def files(self) -> dict[int, LogFile]:
        """Return the file of each selected rank."""
        from strata.launch.rank_logs import files_in, newest  # noqa: PLC0415

        return newest(
            each
            for each in files_in(self._folder)
            if (not self._ranks or each.rank in self._ranks) and self._generation in {None, each.generation}
        )

    def generations(self) -> list[str]:
        """Return lines that name the ranks of each generation, if the shown files belong to several generations."""
        of: dict[int, list[int]] = {}
        for rank, file in self.files().items():
            of.setdefault(file.generation, []).append(rank)
        return [
            f"generation {each}: rank{'s' * (len(of[each]) > 1)} {ranks_text(of[each])}"
            for each in sorted(of)
            if len(of) > 1
        ]

    def show(self, lines: int | None) -> None:
        """Show the content of the files, or the last lines of each."""
        from strata.launch.rank_logs import files_in  # noqa: PLC0415

        self._known = {each.path: each.size for each in files_in(self._folder)}
        for rank, file in self.files().items():
            self._open[rank] = opened = _Open(file)
            if lines is not None:
                opened.skip_to_last(lines)
            self._pass_on(opened)
            self._pass_on(opened)  # the second call reads nothing, and so writes an unfinished last line

    def follow(self) -> bool:
        """Show new output; return False once our output is a pipe that its reader has closed."""
        for rank, file in self.files().items():
            opened = self._open.get(rank)
            if opened is None or opened.file != file:
                if opened is not None:
                    self._pass_on(opened)
                    self._pass_on(opened)
                    self._known[opened.file.path] = opened.stream.tell()
                    opened.close()
                self._open[rank] = opened = _Open(file)
                opened.stream.seek(self._known.get(file.path, 0))
            self._pass_on(opened)
        return not self._console.broken

    def _pass_on(self, opened: _Open) -> None:
        prefix = self._console.prefix(opened.file.rank) if self._prefix else b""
        came = False
        while data := opened.stream.read(READ_BYTES):
            came = True
            if whole := opened.lines.feed(data):
                self._console.write(opened, prefix, whole)
        if not came and (rest := opened.lines.rest()):
            self._console.write(opened, prefix, rest)


class _Open:
    """One file, and how far it has been shown."""

    def __init__(self, file: LogFile) -> None:
        from strata.launch.console import Lines  # noqa: PLC0415

        self.file = file
        self.lines = Lines()
        self.stream: BinaryIO = file.path.open("rb", buffering=0)

    def skip_to_last(self, lines: int) -> None:
        """Seek to the last `lines` lines."""
        ends: deque[int] = deque([0], maxlen=lines + 1)
        at = 0
        while data := self.stream.read(READ_BYTES):
            found = data.find(b"\n")
            while found >= 0:
                ends.append(at + found + 1)
                found = data.find(b"\n", found + 1)
            at += len(data)
        if ends[-1] != at:  # the last line has no newline
            ends.append(at)
        self.stream.seek(ends[0])

    def close(self) -> None:
        self.stream.close()
