"""The rank processes of one generation on one node: started once, watched, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from strata.agent.environment import Place, rank_environment
from strata.agent.health.stack_request import dump_stacks
from strata.client.rank.inspection import RankLog, last_lines
from strata.config.run import PROCESS
from strata.core.exit_codes import DO_NOT_REQUEUE, PREEMPTED
from strata.errors import ConfigError
from strata.launch.rank_logs import RankLogs
from strata.launch.rank_output import RankOutput, open_file
from strata.launch.warm.starting import RANK_LOG, Starter
from strata.launch.warm.warm_program import LAST_WORDS
from strata.observe import get_logger
from strata.observe.words import printable
from strata.processes.children import Child

log = get_logger()

_CANNOT_RUN = 127
"""What a shell says of a command that is not there."""

EARLY_S: Final = 30.0
"""A process that fails by itself within so long, and before a step, has not begun: imports of torch take a part of it."""
MAX_LAST_WORDS: Final = 300
LAST_LINES: Final = 8
"""Of what a rank wrote to stderr, when it has failed."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

Exited = Callable[[int, int, int, str, bool], None]
"""Called when a rank ends itself: (generation, rank, exit code or minus the signal, reason, whether it was early)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A rank's process, and the file in which it says where its threads are."""

    child: Child
    stacks: Path
    started_s: float
    """When it was started, by the event loop's clock."""
    log: RankLog | None = None
    output: RankOutput | None = None
    """Its output, if that goes through this process."""
    dumping: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever asks for its stacks: they all come in one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What the ranks of every generation of a run have in common."""

    starter: Starter
    inherited: Mapping[str, str]
    folder: Path
    """Private to this supervisor, and outlives every group."""
    restart: str = PROCESS
    logs: RankLogs = field(default_factory=RankLogs)
    """Where each rank's output goes, a file each; without a folder, where this process's goes."""
    piped: bool = False
    """Whether output goes through this process, which writes the files then; else ranks do that themselves."""


class RankGroup:
    """The ranks that this member runs in one generation. A rank is started at most once.

    The exit of a rank is reported once, to `on_exit`, unless `stop` ended it. `doom` names why
    a rank is about to be killed, so that its exit carries that reason. `dumps_core` reports the exit of a
    rank early. The end of its process is reported as well; coordinators keep the first report.

    A process of the generation before may be adopted as a rank. Until it has `arrived` it is none
    yet: when it ends, or `give_up` ends it, a new process takes its place and nothing is reported.
    """

    def __init__(self, place: Place, program: Program, *, restarts: int, on_exit: Exited) -> None:
        """`restarts` counts the generations that were started before."""
        self.place = place
        self._program = program
        self._restarts = restarts
        self._on_exit = on_exit
        self._processes: dict[int, RankProcess] = {}
        self._awaited: set[int] = set()
        self._doomed: dict[int, str] = {}
        self._attached: set[int] = set()
        self._heeding: set[int] = set()
        self._stopped: set[int] = set()
        self._lasting: dict[int, str] = {}
        self._stepped: set[int] = set()
        self._finished: set[int] = set()
        self._all_heed = asyncio.Event()
        self._stopping = False
        self.put_down: set[int] = set()
        """The ranks that ran when they were ended from here: their exits say nothing of themselves."""
        self._watchers: dict[int, asyncio.Task[None]] = {}

    def start(self, adopted: Mapping[int, RankProcess] = MappingProxyType({})) -> None:
        """Start one process a slot, but for slots whose process, by local rank, is adopted.

        `ConfigError` when the command cannot be run at all.
        """
        for local_rank, rank in enumerate(self.place.ranks):
            process = adopted.get(local_rank)
            if process is not None:
                process.child.name = f"rank {rank}"
                if process.output is not None:
                    process.output.move(rank)
                self._awaited.add(rank)
                self._has(rank, process)
                log.info("rank.goes_on", rank=rank, pid=process.child.pid, generation=self.place.generation)
                continue
            try:
                self._has(rank, self._new(local_rank))
            except ConfigError:
                self.kill()
                raise

    def _new(self, local_rank: int) -> RankProcess:
        rank = self.place.ranks[local_rank]
        stacks = self._program.folder / f"stacks-{self.place.generation}-{rank}.txt"
        environment = rank_environment(
            self.place,
            local_rank=local_rank,
            inherited=self._program.inherited,
            restarts=self._restarts,
            stacks=str(stacks),
            restart=self._program.restart,
        )
        log_file = self._program.logs.new(self.place.generation, rank)
        file = None  # opened before the start: a process that cannot have its file is not started
        if log_file is not None and self._program.piped:
            file = open_file(log_file.file)
        elif log_file is not None:
            environment[RANK_LOG] = str(log_file.file)
        try:
            started = self._program.starter.start(environment, name=f"rank {rank}")
        except OSError as error:
            if file is not None:
                file.close()
            raise ConfigError(
                f"cannot run the command: {error}",
                hint="the command after -- must be a program on this node",
            ) from error
        child, warm = started.child, {"warm": True} if started.warm else {}
        log.info("rank.started", rank=rank, pid=child.pid, generation=self.place.generation, **warm)
        if started.output is not None:
            started.output.begin(rank, file)
        return RankProcess(
            child=child,
            stacks=stacks,
            started_s=asyncio.get_running_loop().time(),
            log=log_file,
            output=started.output,
        )

    def _has(self, rank: int, process: RankProcess) -> None:
        self._processes[rank] = process
        self._program.logs.begun(rank, process.log)
        self._watchers[rank] = asyncio.create_task(self._watch(rank, process), name=f"watch rank {rank}")

    # -- processes that go from one generation to the next

    def release(self, local_ranks: Collection[int]) -> dict[int, RankProcess]:
        """Give away the processes of these local ranks that live: they are no ranks of this group."""
        released = {}
        for local_rank, rank in enumerate(self.place.ranks):
            process = self._alive(rank)
            if local_rank in local_ranks and process is not None and rank not in self._doomed:
                released[local_rank] = process
                del self._processes[rank]
                self._watchers.pop(rank).cancel()
        return released

    def arrived(self, rank: int) -> None:
        """Take note that a process, adopted or not, is this rank from now on."""
        self._awaited.discard(rank)
        self._attached.add(rank)
        self._lasting.pop(rank, None)

    def give_up(self) -> None:
        """Kill the adopted processes that have not arrived: new ones take their places."""
        for rank in self._awaited:
            if (process := self._alive(rank)) is not None:
                log.warning(
                    "rank.replaced", rank=rank, pid=process.child.pid, reason="it did not go on by itself"
                )
                process.child.kill()

    def pid(self, rank: int) -> int | None:
        """Return the process id of a rank, or None when it does not run here."""
        process = self._alive(rank)
        return process.child.pid if process is not None else None

    async def stack(self, rank: int) -> str | None:
        """Return the Python stacks of a rank's threads; None when it does not run here or cannot tell."""
        process = self._alive(rank)
        if process is None:
            return None
        async with process.dumping:
            return await dump_stacks(process.child, process.stacks)

    @property
    def running(self) -> bool:
        """Whether any rank still runs."""
        return bool(self.alive())

    @property
    def finished(self) -> bool:
        """Whether every rank has ended by itself with 0."""
        return self._finished.issuperset(self.place.ranks)

    def alive(self) -> list[int]:
        """Return the ranks that still run."""
        return [rank for rank in self._processes if self._alive(rank) is not None]

    def note_heeding(self, rank: int) -> None:
        """Take note that a rank stops by itself when its generation is asked to."""
        self._heeding.add(rank)
        if self.heeding:
            self._all_heed.set()

    def note_lasting(self, rank: int, reason: str) -> None:
        """Take note of why a rank is about to end: another try would meet the same, so its exit code counts as 78.

        A program that begins again in spite of it, or goes on, takes that back.
        """
        self._lasting[rank] = reason

    def note_stopped(self, rank: int) -> None:
        """Take note that a rank has stopped as asked: however its program then ends, it is not done, nor has it failed."""
        self._stopped.add(rank)
        self._lasting.pop(rank, None)

    def note_step(self, rank: int) -> None:
        """Take note that a rank said that it has made a step: from now on it has begun."""
        self._stepped.add(rank)
        self._lasting.pop(rank, None)

    async def will_heed(self, limit_s: float) -> bool:
        """Tell whether every rank that still runs heeds notices; one may need that long to say so.

        Whoever has not even attached has nothing to say.
        """
        if not self.heeding and self._attached.issuperset(self.alive()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._all_heed.wait()
        return self.heeding

    @property
    def heeding(self) -> bool:
        """Whether every rank that still runs stops by itself when asked to."""
        return self._heeding.issuperset(self.alive())

    def doom(self, rank: int, reason: str) -> None:
        """Kill one rank that can do nothing more, for `reason`."""
        process = self._alive(rank)
        if process is not None and rank not in self._doomed:
            self._doomed[rank] = reason
            log.warning("rank.killed", rank=rank, pid=process.child.pid, reason=reason)
            process.child.kill()

    def dumps_core(self, rank: int, reason: str) -> None:
        """Report the end of a rank now, though its process still writes a core.

        Its generation ends, and `stop` kills the process after its grace: the core has that long. The kernel
        ignores SIGTERM meanwhile. `give_up` ends an adopted process that has not arrived.
        """
        process = self._alive(rank)
        if process is not None and rank not in self._doomed and rank not in self._awaited:
            self._doomed[rank] = reason
            log.warning("rank.dumps_core", rank=rank, pid=process.child.pid, reason=reason)
            code, reason = self._as_asked(rank, -signal.SIGABRT, reason)
            self._on_exit(self.place.generation, rank, code, reason, False)

    def signal(self, number: int) -> None:
        """Send a signal to every rank's process."""
        for process in self._processes.values():
            process.child.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to every rank and all it started; does not wait."""
        self._puts_down()
        for process in self._processes.values():
            process.child.kill()

    async def stop(self, grace_s: float) -> None:
        """End every rank: SIGTERM, at most `grace_s` to comply, then SIGKILL; none that ran is reported."""
        self._puts_down()
        async with asyncio.TaskGroup() as group:
            for process in self._processes.values():
                group.create_task(process.child.stop_async(grace_s))
        await asyncio.gather(*self._watchers.values())

    def _puts_down(self) -> None:
        self._stopping = True
        self.put_down.update(self.alive())

    async def join(self) -> None:
        """Return once every rank has ended; to cancel this changes nothing for them."""
        await asyncio.shield(asyncio.gather(*self._watchers.values()))

    def _alive(self, rank: int) -> RankProcess | None:
        process = self._processes.get(rank)
        return process if process is not None and process.child.poll() is None else None

    async def _watch(self, rank: int, process: RankProcess) -> None:
        child = process.child
        code = await child.join_async()
        if process.output is not None:
            await process.output.passed_on()
        process.stacks.unlink(missing_ok=True)
        said = _exit_message(process.stacks)
        self._program.logs.ended(rank, process.log, child.describe())
        if rank in self.put_down or (self._stopping and rank in self._awaited):
            return
        if rank in self._awaited:
            self._awaited.discard(rank)
            self._renew(rank)
            return
        own = f"{child.describe()}: {said}" if said and code > 0 else child.describe()
        words = {"stderr": lines} if code != 0 and (lines := _stderr_tail(process)) else {}
        _, short = self._as_asked(rank, code, self._doomed.get(rank, child.describe() if words else own))
        code, reason = self._as_asked(rank, code, self._doomed.get(rank, own))
        self._program.logs.ended(rank, process.log, reason)
        age_s = asyncio.get_running_loop().time() - process.started_s
        failed = code > 0 and code != PREEMPTED and rank not in self._doomed
        early = failed and age_s < EARLY_S and rank not in self._stepped
        log.info("rank.ended", rank=rank, pid=child.pid, code=code, reason=short, **words)
        if code == 0:
            self._finished.add(rank)
        self._on_exit(self.place.generation, rank, code, reason, early)

    def _as_asked(self, rank: int, code: int, reason: str) -> tuple[int, str]:
        """Return how a rank ended: as it said before, whatever its process ends with."""
        if rank in self._stopped and code != PREEMPTED:
            return PREEMPTED, f"stopped as asked, and {reason}"
        if rank in self._lasting and code > 0:
            return DO_NOT_REQUEUE, self._lasting[rank]
        return code, reason

    def _renew(self, rank: int) -> None:
        """Start the rank that an adopted process did not become."""
        try:
            self._has(rank, self._new(self.place.ranks.index(rank)))
        except ConfigError as error:
            self._on_exit(self.place.generation, rank, _CANNOT_RUN, error.message, False)


def _stderr_tail(process: RankProcess) -> list[str]:
    """Return the last lines that a process wrote to stderr; of one that writes into a file by itself, the file's last."""
    if process.output is not None:
        lines = process.output.stderr_tail().decode(errors="replace").split("\n")
        lines = [line.rstrip().rpartition("\r")[2] for line in lines]  # of a progress bar the newest state
    else:
        lines = last_lines(process.log.file) if process.log is not None else []
    said = [printable(_ESCAPES.sub("", line).expandtabs().rstrip()) for line in lines if line.strip()]
    return [line[:MAX_LAST_WORDS] for line in said[-LAST_LINES:]]


def _exit_message(stacks: Path) -> str:
    """Return the end of the traceback that a process left, on one line; "" where it left none."""
    file = stacks.with_name(stacks.name + LAST_WORDS)
    try:
        with file.open(errors="replace") as lines:
            said = " | ".join(lines.read(64 << 10).splitlines())
        file.unlink()
    except OSError:
        return ""
    return said if len(said) <= MAX_LAST_WORDS else f"…{said[1 - MAX_LAST_WORDS :]}"


def inherited_environment() -> dict[str, str]:
    """Return this process's environment, which ranks inherit but for what Strata sets."""
    return dict(os.environ)
