"""One run on a started system: workloads, health check, faults, second health check, end.

    observer and workloads start → healthy → faults → healthy again → workloads end → observer ends

The `Account` collects the results; it is valid even if the run ends early.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from strata.core.kv.keys import ClusterKeys
from strata.errors import StrataError
from strata.etcd import EtcdStore
from strata_chaos import faults
from strata_chaos.backends.base import Site
from strata_chaos.exits import Exit
from strata_chaos.faults.nemesis import Nemesis
from strata_chaos.faults.record import Injury
from strata_chaos.faults.schedule import PlannedFault
from strata_chaos.history import HistoryWriter
from strata_chaos.judgement.verdict import Finding
from strata_chaos.run.cluster_monitor import ClusterMonitor
from strata_chaos.run.health import Health
from strata_chaos.run.programs import Programs, jobs_of
from strata_chaos.run.restarter import Restarter
from strata_chaos.run.roster import Roster
from strata_chaos.run.system import System
from strata_chaos.scenario import Scenario

BASELINE_S: Final = 90.0
"""How long the system may take to be healthy before the first fault."""
SETTLE_S: Final = 1.0
"""Time between the last client's exit and the observer's. etcd's events reach the observer within milliseconds."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S: Final = 0.25

Say = Callable[[str], None]


@dataclass(slots=True)
class Account:
    """The results of the run so far."""

    injuries: list[Injury] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    restarts: int = 0
    broken: str = ""
    cut_short: bool = False


class _Broken(StrataError):
    """The run cannot continue: a program failed, or the system is not healthy before the first fault."""


class Session:
    """One run of a plan. `clock` is CLOCK_BOOTTIME in seconds."""

    def __init__(
        self,
        scenario: Scenario,
        plan: Sequence[PlannedFault],
        site: Site,
        folder: Path,
        *,
        seed: int,
        duration_s: float,
        clock: Callable[[], float],
        say: Say,
    ) -> None:
        self._scenario = scenario
        self._plan = plan
        self._site = site
        self._folder = folder
        self._seed = seed
        self._duration_s = duration_s
        self._clock = clock
        self._say = say
        self._programs = Programs(folder)
        self._jobs = jobs_of(scenario)
        self.account = Account()

    async def run(self) -> None:
        """Return once the run is over. A signal ends the run early, with all faults healed."""
        with _on_signals(self._cut_short):
            try:
                await self._guarded()
            except asyncio.CancelledError:
                if not self.account.cut_short:
                    raise
                self._say("cut short; the faults are healed")
            finally:
                self._programs.kill()

    async def _guarded(self) -> None:
        try:
            async with self._connected() as store:
                await self._on(store)
        except* (StrataError, OSError) as group:
            self.account.broken = str(_first(group))

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[EtcdStore]:
        """Open a new store, which has no state of an earlier life of etcd."""
        endpoints = self._site.cluster.etcd.endpoints
        async with await EtcdStore.connect(endpoints, tls=self._site.etcd_tls) as store:
            yield store

    def _cut_short(self) -> None:
        self.account.cut_short = True

    async def _on(self, store: EtcdStore) -> None:
        monitor = ClusterMonitor(store, ClusterKeys("default"), again=self._connected)
        system = System(
            cluster=self._site.cluster,
            monitor=monitor,
            roster=Roster(self._folder),
            hosts=(*self._site.hosts,),
            network=self._site.network,
            folder=self._folder,
            recording=self._programs,
        )
        health = Health(system, self._jobs, credentials=self._site.credentials, clock=self._clock)
        restarter = Restarter(system, say=self._say)
        try:
            with HistoryWriter(self._folder / "nemesis.jsonl") as writer:
                nemesis = Nemesis(
                    system,
                    health,
                    writer,
                    faults=faults.ALL,
                    barrier_jobs=[job for job, w in self._jobs.items() if w.barriers],
                    recovery_s=self._scenario.recovery_s,
                    clock=self._clock,
                    say=self._say,
                )
                self.account.injuries = nemesis.injuries
                async with _beside(monitor.run(), restarter.run()):
                    await monitor.started()
                    placed = self._programs.start(self._site, self._jobs, seed=self._seed)
                    for job, host in placed.items():
                        nemesis.placed(job, host)
                    async with _beside(self._watch_programs()):
                        if late := await self._programs.running():
                            raise _Broken(late)
                        await self._faults(nemesis, health)
                    await self._end(nemesis)
        finally:
            health.close()
            self.account.restarts = restarter.restarts
            self.account.findings += nemesis.findings
            self.account.findings += [
                Finding(checker="processes", message=problem) for problem in restarter.findings
            ]

    async def _faults(self, nemesis: Nemesis, health: Health) -> None:
        nemesis.phase("baseline")
        took_s, wrong = await health.wait_healthy(BASELINE_S)
        if wrong:
            raise _Broken(f"before any fault, after {took_s:.0f} s: {'; '.join(wrong)}")
        self._say(f"all is well after {took_s:.1f} s; {len(self._plan)} faults in {self._duration_s:g} s")
        nemesis.phase("faults")
        begin_s = self._clock()
        await nemesis.run(self._plan)
        await asyncio.sleep(max(0.0, begin_s + self._duration_s - self._clock()))
        nemesis.phase("recovery")
        took_s, wrong = await health.wait_healthy(self._scenario.recovery_s)
        if wrong:
            problem = f"not well {took_s:.0f} s after the last fault: {'; '.join(wrong)}"
            self.account.findings.append(Finding(checker="recovery", message=problem))
            self._say(problem)
        else:
            self._say(f"all is well {took_s:.1f} s after the end of the faults")

    async def _end(self, nemesis: Nemesis) -> None:
        nemesis.phase("end")
        problems = await self._programs.stop_workloads()
        await asyncio.sleep(SETTLE_S)
        problems += await self._programs.stop_observer()
        if problems:
            raise _Broken("; ".join(problems))

    async def _watch_programs(self) -> None:
        """Raise if the observer or a workload exits without a request."""
        while True:
            await asyncio.sleep(_POLL_S)
            if problem := self._programs.ended():
                raise _Broken(f"a program of the run ended by itself: {problem}")


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first error of a nested exception group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextlib.asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run all coroutines of `work` while the body runs; if one of them fails, the body ends."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part) for part in work]
        yield
        for task in running:
            task.cancel()


@contextlib.contextmanager
def _on_signals(notify: Callable[[], None]) -> Iterator[None]:
    """On the first signal call `notify` and cancel the task that entered this context; on the second exit at once.

    After such an exit the guardian processes end all children, as after SIGKILL.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) > 1:
            os._exit(Exit.UNKNOWN)
        notify()
        task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
