"""Cost for a rank of measuring and reporting each step, relative to the time of the step.

    python -m benchmarks.step_report [--json FILE] [--steps 100] [--step-ms 100] [--ranks 1000]

A step is `--step-ms` of numpy in the trainer's thread. Each step goes through `ComputeTimer` and
`RankClient.progress`. The client's thread keeps the window of recent steps and sends ten messages a second. The CPU
time of both threads counts, because the client's thread needs the GIL too. Also measured: how long a replica takes to
diagnose a job of `--ranks`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from strata.client.event_loop import BackgroundLoop
from strata.client.rank.rank_client import RankClient
from strata.client.rank.shared_session import RankObserver, RankPlace, SharedSession
from strata.core.health.attribution import RankReport
from strata.core.health.findings import diagnose
from strata.core.health.stragglers import StepTimes
from strata.session.client_session import Session
from strata.training.loop.clock import Clock
from strata.training.loop.compute_timer import ComputeTimer
from strata.v1.members_pb2 import RankProgress
from strata.v1.session_pb2 import Progress

GOAL = 0.01
DIAGNOSIS_GOAL_MS = 50.0
PACE_S = 0.1


class Sending:
    """Stands in for a session: encodes the newest progress ten times a second, and discards it."""

    error = world = None

    def __init__(self) -> None:
        self._newest: dict[int, RankProgress] = {}
        self._due = False
        self.sent = 0

    def progress(self, generation: int, ranks: Iterable[RankProgress]) -> None:
        self._newest.update({one.rank: one for one in ranks})
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(PACE_S, self._flush)

    async def leave(self, reason: str, *, limit_s: float) -> None:
        """Do nothing: there is no session to leave."""

    async def rank_exit(self, **facts: object) -> None:
        """Do nothing: there is no coordinator to report to."""

    def _flush(self) -> None:
        self._due = False
        self.sent += len(Progress(generation=1, ranks=self._newest.values()).SerializeToString())


def work(seconds: float, matrix: np.ndarray[Any, Any]) -> None:
    """Use the processor for so many seconds of CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        matrix @ matrix  # the result is not used: the call takes CPU time


def train(steps: int, step_s: float) -> dict[str, Any]:
    """Return the CPU time of measuring and reporting a step."""
    background = BackgroundLoop()
    session = Sending()
    place = RankPlace(job="j", worker_id="w", generation=1, rank=0, world_size=8)

    async def connect() -> RankClient:
        shared_session = SharedSession(
            session=cast("Session", session), watcher=RankObserver(), place=place, owns_member=False
        )
        return RankClient(shared_session, background)

    client = background.call(connect())
    timer = ComputeTimer(Clock(monotonic_s=time.monotonic, unix_s=time.time, thread_s=time.thread_time))
    matrix = np.ones((32, 32))

    def endless() -> Iterator[int]:
        while True:
            yield 0

    measured = timer.waiting(endless())
    clock = time.pthread_getcpuclockid(background.call(thread_id()))
    own_s = 0.0
    before_s, began_s = time.clock_gettime(clock), time.monotonic()
    for step in range(1, steps + 1):
        mark_s = time.thread_time()
        next(measured)
        timer.begins()
        own_s += time.thread_time() - mark_s
        work(step_s, matrix)
        mark_s = time.thread_time()
        timer.completed()
        client.progress(step, "step", own_s=timer.last_s, data_wait_s=timer.last_data_wait_s)
        own_s += time.thread_time() - mark_s
    other_s, took_s = time.clock_gettime(clock) - before_s, time.monotonic() - began_s
    client.close()
    background.stop()
    return {
        "step_ms": round(1000 * step_s, 3),
        "trainer_us": round(1e6 * own_s / steps, 1),
        "client_us": round(1e6 * other_s / steps, 1),
        "ratio": round((own_s + other_s) / steps / step_s, 5),
        "took_s": round(took_s, 1),
        "sent_bytes": session.sent,
    }


async def thread_id() -> int:
    """Return the id of the thread that runs this."""
    return threading.get_ident()


def diagnosis_ms(ranks: int) -> float:
    """Return the median milliseconds of a diagnosis of `ranks` ranks, one of which is slow."""
    reports = [
        RankReport(
            rank=rank,
            step=500,
            phase="step",
            age_ms=100,
            times=StepTimes(
                compute_s=0.3 if rank == 7 else 0.1,
                data_wait_s=0.0,
                median_compute_s=0.3 if rank == 7 else 0.1,
                median_data_wait_s=0.0,
                best_compute_s=0.1,
                cheaper_s=0.3 if rank == 7 else 0.1,
                steady_steps=50,
            ),
        )
        for rank in range(ranks)
    ]
    took = []
    for _ in range(20):
        began = time.thread_time()
        assert len(diagnose(reports).findings) == 1
        took.append(1000 * (time.thread_time() - began))
    return round(statistics.median(took), 2)


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--ranks", type=int, default=1000)
    options = parser.parse_args()
    found = train(options.steps, options.step_ms / 1000)
    found["diagnosis_ms"] = diagnosis_ms(options.ranks)
    summary = (
        f"steps of {options.step_ms:g} ms: measuring and reporting one takes {found['trainer_us']:g} µs of the trainer's"
        f" thread and {found['client_us']:g} µs of the client's, {100 * found['ratio']:.2f} % of it; a replica diagnoses {options.ranks} ranks in {found['diagnosis_ms']:g} ms"
    )
    body = {
        "benchmark": "step_report",
        "goal": f"< {GOAL:.0%} of the step time; a diagnosis ≤ {DIAGNOSIS_GOAL_MS:g} ms",
        "met": found["ratio"] < GOAL and found["diagnosis_ms"] <= DIAGNOSIS_GOAL_MS,
        "summary": summary,
        **found,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(body))
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
