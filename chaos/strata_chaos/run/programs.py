"""The programs beside the system under test: the observer, and the workloads with their clients."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from strata.errors import Unavailable
from strata.processes.children import Child
from strata_chaos.backends.base import Site
from strata_chaos.scenario import Scenario, Workload

STOP_S: Final = 30.0
"""How long a workload may take to shut its clients down cleanly."""
START_S: Final = 60.0
"""How long a program may take until its first record. Starting Python takes seconds on a busy machine."""
POLL_S: Final = 0.05
OBSERVER: Final = "observer"
READERS: Final = 4
"""The most clients that a workload has besides its members."""


def jobs_of(scenario: Scenario) -> dict[str, Workload]:
    """Return the workloads of a scenario by job name."""
    return {f"{workload.name}-{n}": workload for n, workload in enumerate(scenario.workloads, 1)}


def members_of(scenario: Scenario) -> list[str]:
    """Return the worker ids that the workloads of a scenario may register under."""
    return [
        f"{job}-{who}"
        for job, workload in jobs_of(scenario).items()
        for who in ("founder", *range(workload.clients + READERS))
    ]


class Programs:
    """Observer and workloads of one run: `start` starts them, `stop_workloads` and `stop_observer` end them.

    `ended` names a program that exited without a request.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workloads: dict[str, Child] = {}
        self._observer: Child | None = None
        self._observing: list[str] = []
        """Command of an observer, without its history file."""
        self._lives = 1

    def start(self, site: Site, jobs: Mapping[str, Workload], *, seed: int) -> dict[str, str]:
        """Start the observer, then every workload on its host; return each job's host."""
        etcd = ",".join(site.cluster.etcd.endpoints)
        words = ["strata_chaos.observer", "--etcd", etcd]
        if (tls := site.etcd_tls) is not None:
            words += ["--etcd-ca-file", str(tls.ca_file), "--etcd-cert-file", str(tls.cert_file)]
            words += ["--etcd-key-file", str(tls.key_file)]
        self._observing = words
        self._observer = self._child(OBSERVER, [], [*words, *self._history(OBSERVER)], {})
        placed = {}
        for number, (job, workload) in enumerate(jobs.items()):
            host = site.workers[number % len(site.workers)]
            words = [f"strata_chaos.workloads.{workload.name}"]
            words += ["--endpoints", site.cluster.endpoints, "--job", job, *self._history(job)]
            words += ["--seed", str(seed), "--clients", str(workload.clients)]
            for key, value in workload.options.items():
                words += [f"--{key.replace('_', '-')}", value]
            self._workloads[job] = self._child(job, host.enter, words, site.environment)
            placed[job] = host.name
        return placed

    async def end_life(self) -> str:
        """End the observer of this life of etcd once it has recorded all events; return the problems, in words."""
        observer, self._observer = self._observer, None  # so that `ended` does not report its end
        return "; ".join(await _stopped({OBSERVER: observer} if observer else {}, STOP_S))

    async def begin_life(self, *, listed_at: int) -> None:
        """Start an observer of the new etcd, and wait until it records."""
        self._lives += 1
        name = f"{OBSERVER}-{self._lives}"
        words = [*self._observing, *self._history(name), "--life", str(self._lives)]
        if listed_at:
            words += ["--listed-at", str(listed_at)]
        self._observer = self._child(name, [], words, {})
        if late := await self._begun([name]):
            raise Unavailable(late)

    async def running(self) -> str:
        """Return "" once all programs record (only then do they react to SIGTERM), or a sentence about the others."""
        return await self._begun([OBSERVER, *self._workloads])

    async def _begun(self, waiting: list[str]) -> str:
        try:
            async with asyncio.timeout(START_S):
                while True:
                    waiting = [name for name in waiting if not _has_begun(self._folder / f"{name}.jsonl")]
                    if not waiting:
                        return ""
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return f"{', '.join(waiting)} recorded nothing within {START_S:g} s"

    def ended(self) -> str:
        """Return which program exited without a request, and how; empty while all programs run."""
        children = [*self._workloads.items()]
        if self._observer is not None:
            children.append((OBSERVER, self._observer))
        for name, child in children:
            if child.poll() is not None:
                return f"{name} {child.describe()}:\n{child.tail(12)}"
        return ""

    async def stop_workloads(self) -> list[str]:
        """Shut the workloads down cleanly; return the problems, in words."""
        return await _stopped(self._workloads, STOP_S)

    async def stop_observer(self) -> list[str]:
        """End the observer; return the problems, in words."""
        return await _stopped({OBSERVER: self._observer} if self._observer else {}, STOP_S)

    def kill(self) -> None:
        """Kill all programs."""
        for child in (*self._workloads.values(), *((self._observer,) if self._observer else ())):
            child.kill()

    def _history(self, name: str) -> Sequence[str]:
        return "--history", str(self._folder / f"{name}.jsonl")

    def _child(
        self, name: str, enter: Sequence[str], words: Sequence[str], environment: Mapping[str, str]
    ) -> Child:
        log = self._folder / "logs" / f"{name}.log"
        command = [*enter, sys.executable, "-m", *words]
        return Child.start(command, name=name, log=log, env={**os.environ, **environment})


def _has_begun(history: Path) -> bool:
    return history.exists() and history.stat().st_size > 0


async def _stopped(children: Mapping[str, Child], grace_s: float) -> list[str]:
    for child in children.values():
        child.request_stop()
    codes = await asyncio.gather(*(child.stop_async(grace_s) for child in children.values()))
    return [
        f"{name} {child.describe()} after its stop request:\n{child.tail(12)}"
        for (name, child), code in zip(children.items(), codes, strict=True)
        if code != 0
    ]
