"""Many seeds over several processes, and their summary."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.processes.guard import PR_SET_PDEATHSIG
from tests.sim.faults import FAULTS
from tests.sim.run import Result, run_seed

HASH_SEED = "0"
"""Hash seed of str, so that sets of strings have the same order in every process. With another hash seed, one
simulation seed in forty gives another run."""

NICE = 15
"""Niceness of processes that give way to others."""

AUTOGROUP = Path("/proc/self/autogroup")
"""The kernel's scheduling group of this process's session, on kernels that schedule by session."""

EVENTS = (
    "elections",
    "leadership ended",
    "generations",
    "restores",
    "hand-overs",
    "registrations",
    "deaths of the dead",
    "members ended: StaleIncarnation",
    "phase paused",
    "phase running",
    "notices to preempt",
    "notices to pause",
    "notices to drain",
    "ranks that stopped",
    "ranks that attached again",
    "ranks evicted: frozen",
    "ranks evicted: disconnected",
    "ranks ended: StaleIncarnation",
    "rivals refused",
    "rivals let in",
    "notices to scale",
    "ranks that stopped at a common step",
    "rounds that came too late",
    "members that ended with their generation",
    "members that left as asked",
    "confirmed scale_job",
    "confirmed stop_job",
    "confirmed resume_job",
    "barriers released",
    "barriers broken",
    "barriers timed_out",
    "checkpoints committed",
    "checkpoints aborted",
    "checkpoints deleting",
    "checkpoints corrupt",
    "checkpoints gone",
    "confirmed set_retention",
    "confirmed open_checkpoint",
    "confirmed report_copy",
    "confirmed rewind_job",
    "log watch_compacted",
    "log watch_lost",
    "log registration_lost",
    "log leadership_not_renewed",
)
"""Events that must occur somewhere in a long run; otherwise the run proves little."""


@dataclass(slots=True)
class Summary:
    """The summary of many seeds."""

    seeds: int = 0
    failed: dict[int, list[str]] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)
    effective: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    cpu_s: float = 0.0

    def add(self, result: Result) -> None:
        """Add the result of one seed."""
        self.seeds += 1
        self.tried += result.tried
        self.effective += result.faults
        self.events += result.events
        self.virtual_s += result.virtual_s
        self.cpu_s += result.cpu_s
        if result.violations:
            self.failed[result.seed] = result.violations[:10]

    def never(self) -> list[str]:
        """Return the faults that never took effect, and the events that never occurred."""
        faults = [f"fault {name!r}" for name in FAULTS if not self.effective[name]]
        return faults + [f"event {name!r}" for name in EVENTS if not self.events[name]]

    def text(self) -> str:
        """Return the summary for people."""
        lines = [
            f"{self.seeds} seeds, {self.virtual_s / 3600:.1f} virtual hours, {self.cpu_s:.0f} s of CPU",
            f"{self.effective.total()} effective faults, {len(self.failed)} seeds failed",
            "faults (effective of tried):",
            *(f"  {name:28} {self.effective[name]:7} {self.tried[name]:7}" for name in FAULTS),
            "events:",
            *(f"  {name:40} {count:9}" for name, count in sorted(self.events.items())),
        ]
        lines += [f"seed {seed}: {wrong[0]}" for seed, wrong in sorted(self.failed.items())]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the summary for machines."""
        return {
            "seeds": self.seeds,
            "failed": {str(seed): wrong for seed, wrong in sorted(self.failed.items())},
            "effective": dict(sorted(self.effective.items())),
            "tried": dict(sorted(self.tried.items())),
            "events": dict(sorted(self.events.items())),
            "never": self.never(),
            "virtual_s": round(self.virtual_s, 1),
            "cpu_s": round(self.cpu_s, 1),
        }


@contextmanager
def pool(jobs: int, *, give_way: bool = True) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of processes for seeds; with `give_way` they use idle CPU time only.

    They end when this process ends.
    """
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = HASH_SEED  # the children read it at their start
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(give_way,)) as processes:
        try:
            yield processes
        finally:
            processes.shutdown(wait=True, cancel_futures=True)
            del os.environ["PYTHONHASHSEED"]
            if before is not None:
                os.environ["PYTHONHASHSEED"] = before


def _begin(give_way: bool) -> None:
    """Set up a child: it dies with its parent, lowers its priority if requested, and leaves Ctrl-C to the parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # the parent died before prctl: no signal will ever come
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if give_way:
        _give_way()
    gc.collect()
    gc.freeze()  # from now on the collector skips the objects that exist already, and finds only the garbage of seeds


def _give_way() -> None:
    """Use only processor time that other processes leave idle, including those of other sessions.

    If the kernel schedules by session (`autogroup` of sched(7)), niceness counts only within a process's own session.
    A session that always has work then takes its full share, whatever its niceness. Such a session starved the ranks
    of a torchrun agent, which have sessions of their own: they got one hundredth of a core.
    """
    os.nice(NICE)
    os.setsid()
    with suppress(OSError):  # a kernel without autogroups, or a read-only /proc
        AUTOGROUP.write_text(str(NICE))


def summary(
    seeds: Iterable[int],
    *,
    jobs: int,
    each: Callable[[Result, Summary], None] = lambda _result, _so_far: None,
) -> Summary:
    """Run seeds and add them up; call `each` with every result."""
    total = Summary()
    with pool(jobs) as processes:
        try:
            for result in processes.map(run_seed, seeds):
                total.add(result)
                each(result, total)
        except KeyboardInterrupt:
            pass  # return the summary so far
    return total
