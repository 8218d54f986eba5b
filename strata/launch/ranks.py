"""The rank processes of one generation on one node: started once, watched, stopped together."""

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
from strata.launch.warm.warm_program import EXIT_MESSAGE_SUFFIX
from strata.observe import get_logger
from strata.observe.words import printable
from strata.processes.children import Child

log = get_logger()

_CANNOT_RUN = 127
"""A shell's exit code for a command that does not exist."""

EARLY_S: Final = 30.0
"""A process that fails within this time and before a step counts as not begun. The time includes the import of
torch.
"""
MAX_EXIT_MESSAGE: Final = 300
LAST_LINES: Final = 8
"""Number of lines of a failed rank's stderr that are logged."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

Exited = Callable[[int, int, int, str, bool], None]
"""Called when a rank ends by itself: (generation, rank, exit code or minus the signal, reason, whether early)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A rank's process, and the file into which it writes its stacks."""

    child: Child
    stacks: Path
    started_s: float
    """When it was started, by the event loop's clock."""
    log: RankLog | None = None
    output: RankOutput | None = None
    """Its output, if the output goes through the agent."""
    dumping: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Locked during a request for the process's stacks: all dumps of the process go into one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The settings that the ranks of every generation of a run share."""

    starter: Starter
    inherited: Mapping[str, str]
    folder: Path
    """A folder that only this agent uses; it outlives every group."""
    restart: str = PROCESS
    logs: RankLogs = field(default_factory=RankLogs)
    """The output files, one per process; without a folder, ranks write to this process's own output."""
    piped: bool = False
    """Whether output goes through this process, which then writes the files; otherwise ranks write them."""


class RankGroup:
    """The ranks that this member runs in one generation. A rank is started at most once.

    The group reports the exit of a rank once to `on_exit`, unless `stop` ended the rank. `doom` kills a rank and sets
    the reason that its exit report carries. `dumps_core` reports the exit of a rank early; the end of its process is
    reported too, and coordinators keep the first report.

    A process of the previous generation may be adopted as a rank. It is not a rank until it has `arrived`. If
    it ends before that, or `give_up` ends it, a new process takes its place and nothing is reported.
    """

    def __init__(self, place: Place, program: Program, *, restarts: int, on_exit: Exited) -> None:
        """`restarts` counts the generations started here before."""
        self.place = place
        self._program = program
        self._restarts = restarts
        self._on_exit = on_exit
        self._processes: dict[int, RankProcess] = {}
        self._awaited: set[int] = set()
        self._kill_reasons: dict[int, str] = {}
        self._attached: set[int] = set()
        self._supporting_graceful_stop: set[int] = set()
        self._stopped: set[int] = set()
        self._not_to_requeue: dict[int, str] = {}
        self._stepped: set[int] = set()
        self._finished: set[int] = set()
        self._all_support = asyncio.Event()
        self._stopping = False
        self.put_down: set[int] = set()
        """The ranks that still ran when this agent ended them: their exit codes show no failure of their own."""
        self._watchers: dict[int, asyncio.Task[None]] = {}

    def start(self, adopted: Mapping[int, RankProcess] = MappingProxyType({})) -> None:
        """Start one process per slot, except for slots whose process is adopted (`adopted`, by local rank).

        `ConfigError` if the command cannot be run at all.
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
        file = None  # opened before the start: a process whose file cannot be opened is not started
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

    # -- processes that continue in the next generation

    def release(self, local_ranks: Collection[int]) -> dict[int, RankProcess]:
        """Release the living processes of these local ranks: they are no longer ranks of this group."""
        released = {}
        for local_rank, rank in enumerate(self.place.ranks):
            process = self._alive(rank)
            if local_rank in local_ranks and process is not None and rank not in self._kill_reasons:
                released[local_rank] = process
                del self._processes[rank]
                self._watchers.pop(rank).cancel()
        return released

    def arrived(self, rank: int) -> None:
        """Record that a process, adopted or not, has attached and is this rank from now on."""
        self._awaited.discard(rank)
        self._attached.add(rank)
        self._not_to_requeue.pop(rank, None)

    def give_up(self) -> None:
        """Kill the adopted processes that have not arrived: new processes take their places."""
        for rank in self._awaited:
            if (process := self._alive(rank)) is not None:
                log.warning(
                    "rank.replaced", rank=rank, pid=process.child.pid, reason="it did not go on by itself"
                )
                process.child.kill()

    def pid(self, rank: int) -> int | None:
        """Return the process id of a rank, or None if it does not run here."""
        process = self._alive(rank)
        return process.child.pid if process is not None else None

    async def stack(self, rank: int) -> str | None:
        """Return the Python stacks of a rank's threads; None if the rank does not run here or does not answer."""
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

    def note_graceful_stop_support(self, rank: int) -> None:
        """Record that a rank stops by itself at a stop request to its generation."""
        self._supporting_graceful_stop.add(rank)
        if self.supports_graceful_stop:
            self._all_support.set()

    def note_lasting(self, rank: int, reason: str) -> None:
        """Record why a rank is about to end. A restart would not cure the reason, so the rank's exit code
        counts as 78.

        A later attach or step of the same rank withdraws that record.
        """
        self._not_to_requeue[rank] = reason

    def note_stopped(self, rank: int) -> None:
        """Record that a rank stopped as requested: whatever its exit code, it has neither finished nor failed."""
        self._stopped.add(rank)
        self._not_to_requeue.pop(rank, None)

    def note_step(self, rank: int) -> None:
        """Record that a rank reported a step: from now on it has begun."""
        self._stepped.add(rank)
        self._not_to_requeue.pop(rank, None)

    async def wait_graceful_stop_support(self, limit_s: float) -> bool:
        """Tell whether every rank that still runs supports graceful stop; wait up to `limit_s` for their reports.

        A rank that has not attached cannot report: if there is such a rank, return immediately.
        """
        if not self.supports_graceful_stop and self._attached.issuperset(self.alive()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._all_support.wait()
        return self.supports_graceful_stop

    @property
    def supports_graceful_stop(self) -> bool:
        """Whether every rank that still runs stops by itself when requested."""
        return self._supporting_graceful_stop.issuperset(self.alive())

    def doom(self, rank: int, reason: str) -> None:
        """Kill one rank that cannot make progress any more, for `reason`."""
        process = self._alive(rank)
        if process is not None and rank not in self._kill_reasons:
            self._kill_reasons[rank] = reason
            log.warning("rank.killed", rank=rank, pid=process.child.pid, reason=reason)
            process.child.kill()

    def dumps_core(self, rank: int, reason: str) -> None:
        """Report the exit of a rank now, though its process is still writing a core file.

        The rank's generation ends, and `stop` kills the process after the grace, so the kernel has only the
        grace to write the core file. Meanwhile SIGTERM has no effect on the process. `give_up` ends an adopted
        process that has not arrived.
        """
        process = self._alive(rank)
        if process is not None and rank not in self._kill_reasons and rank not in self._awaited:
            self._kill_reasons[rank] = reason
            log.warning("rank.dumps_core", rank=rank, pid=process.child.pid, reason=reason)
            code, reason = self._as_reported_before(rank, -signal.SIGABRT, reason)
            self._on_exit(self.place.generation, rank, code, reason, False)

    def signal(self, number: int) -> None:
        """Send a signal to every rank's process."""
        for process in self._processes.values():
            process.child.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to every rank and all processes it started; does not wait."""
        self._mark_ended_here()
        for process in self._processes.values():
            process.child.kill()

    async def stop(self, grace_s: float) -> None:
        """End every rank: SIGTERM, at most `grace_s` to comply, then SIGKILL. Report no exit that this causes."""
        self._mark_ended_here()
        async with asyncio.TaskGroup() as group:
            for process in self._processes.values():
                group.create_task(process.child.stop_async(grace_s))
        await asyncio.gather(*self._watchers.values())

    def _mark_ended_here(self) -> None:
        self._stopping = True
        self.put_down.update(self.alive())

    async def join(self) -> None:
        """Return once every rank has ended; cancelling this does not affect the ranks."""
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
        message = _exit_message(process.stacks)
        self._program.logs.ended(rank, process.log, child.describe())
        if rank in self.put_down or (self._stopping and rank in self._awaited):
            return
        if rank in self._awaited:
            self._awaited.discard(rank)
            self._start_replacement(rank)
            return
        own = f"{child.describe()}: {message}" if message and code > 0 else child.describe()
        stderr = {"stderr": lines} if code != 0 and (lines := _stderr_tail(process)) else {}
        _, short = self._as_reported_before(
            rank, code, self._kill_reasons.get(rank, child.describe() if stderr else own)
        )
        code, reason = self._as_reported_before(rank, code, self._kill_reasons.get(rank, own))
        self._program.logs.ended(rank, process.log, reason)
        age_s = asyncio.get_running_loop().time() - process.started_s
        failed = code > 0 and code != PREEMPTED and rank not in self._kill_reasons
        early = failed and age_s < EARLY_S and rank not in self._stepped
        log.info("rank.ended", rank=rank, pid=child.pid, code=code, reason=short, **stderr)
        if code == 0:
            self._finished.add(rank)
        self._on_exit(self.place.generation, rank, code, reason, early)

    def _as_reported_before(self, rank: int, code: int, reason: str) -> tuple[int, str]:
        """Return the exit code and reason to report: a rank's own earlier report wins over its process's exit code."""
        if rank in self._stopped and code != PREEMPTED:
            return PREEMPTED, f"stopped as requested, and {reason}"
        if rank in self._not_to_requeue and code > 0:
            return DO_NOT_REQUEUE, self._not_to_requeue[rank]
        return code, reason

    def _start_replacement(self, rank: int) -> None:
        """Start a new process as the rank that an adopted process did not become."""
        try:
            self._has(rank, self._new(self.place.ranks.index(rank)))
        except ConfigError as error:
            self._on_exit(self.place.generation, rank, _CANNOT_RUN, error.message, False)


def _stderr_tail(process: RankProcess) -> list[str]:
    """Return the last lines of a process's stderr, or of its log file if the process writes that file itself."""
    if process.output is not None:
        lines = process.output.stderr_tail().decode(errors="replace").split("\n")
        lines = [line.rstrip().rpartition("\r")[2] for line in lines]  # of a progress bar, the newest state
    else:
        lines = last_lines(process.log.file) if process.log is not None else []
    shown = [printable(_ESCAPES.sub("", line).expandtabs().rstrip()) for line in lines if line.strip()]
    return [line[:MAX_EXIT_MESSAGE] for line in shown[-LAST_LINES:]]


def _exit_message(stacks: Path) -> str:
    """Return the end of the traceback that a process left, on one line; "" if it left none."""
    file = stacks.with_name(stacks.name + EXIT_MESSAGE_SUFFIX)
    try:
        with file.open(errors="replace") as lines:
            message = " | ".join(lines.read(64 << 10).splitlines())
        file.unlink()
    except OSError:
        return ""
    return message if len(message) <= MAX_EXIT_MESSAGE else f"…{message[1 - MAX_EXIT_MESSAGE :]}"


def inherited_environment() -> dict[str, str]:
    """Return the part of this process's environment that ranks inherit: all variables but those that Strata sets."""
    return dict(os.environ)
