"""Cost of the HTTP API's history and stream for a replica: memory and CPU.

Memory: the charts of 50 jobs of 1,000 ranks, recorded until the rings of seconds are full, and filled as they are
after a day. CPU, first figure: recording these charts once a second. CPU, second figure: three viewers of the ranks,
the heat map, the job and the history of one job, whose 1,000 ranks report every second. Both figures come from a loop
of virtual seconds without a network, so only the replica's own work counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from pathlib import Path
from typing import Any

from strata.coordinator.status.diagnosis import Diagnoses
from strata.core.health.history import INTERVALS, Kind
from strata.core.job import JobView
from strata.dashboard.api.resources import Resources
from strata.dashboard.api.stream import Streams
from strata.v1.members_pb2 import RankProgress, TrainingReport
from tests.unit.dashboard.rig import Shown

JOBS, RANKS = 50, 1000
VIEWERS = 3
SECONDS = 30
GOAL_CORE = 0.05
"""Share of a core, for three viewers at 1 Hz."""


def rss_bytes() -> int:
    gc.collect()
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")
    )
    return int(line.split()[1]) << 10


def report(shown: Shown, job: str, step: int) -> None:
    """Have every rank of a job report a step."""
    reports = [
        RankProgress(rank=rank, step=step, phase="step", step_us=100_000 + 37 * rank, median_step_us=100_000)
        for rank in range(RANKS)
    ]
    causes = ("step", "save", "lost", "start", "restore", "between")
    reports[0].training.CopyFrom(
        TrainingReport(
            samples=step * RANKS,
            target_step=10**6,
            reported=dict.fromkeys(("loss", "lr", "grad_norm"), 1 / step),
            goodput_s={cause: step / (1 + n) for n, cause in enumerate(causes)},
        )
    )
    shown.board.note(job, 1, reports, own=True)


async def memory(shown: Shown) -> tuple[float, float]:
    """Return the MB of all jobs' charts, and the CPU seconds of recording one second."""
    for number in range(JOBS):
        shown.job(f"job-{number}", members=RANKS // 8, slots=8)
    report_s = 0.0
    for number in range(JOBS):
        report(shown, f"job-{number}", 1)
    before, spent_s = rss_bytes(), 0.0
    now = shown.unix_s()
    seconds = 60
    for second in range(seconds):
        shown.unix_s = lambda second=second: now + second  # type: ignore[misc]
        if second % 10 == 0:
            for number in range(JOBS):
                report(shown, f"job-{number}", 2 + second)
        began = time.process_time()
        shown.charts.sample(shown.board, asyncio.get_running_loop().time())
        spent_s += time.process_time() - began
    for number in range(
        JOBS
    ):  # the additions of a day: the rings have a fixed size, and this touches their pages
        charts = shown.charts.job(f"job-{number}")
        assert charts is not None
        for interval_s, size in INTERVALS.items():
            charts.history.put(int(now) + seconds + interval_s * size, "step", 1.0, Kind.LAST)
        for column in range(60):
            charts.heat.put(int(now) + 10 * column, 0, 1)
    return (rss_bytes() - before) / 1e6, spent_s / seconds + report_s


async def viewers(shown: Shown) -> float:
    """Return the share of a core that three viewers of one job take."""
    job = "watched"
    shown.job(job, members=RANKS // 8, slots=8)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    shown.unix_s = lambda: 1.8e9 + loop.time() - begun
    diagnoses = Diagnoses()
    shown.diagnosis = lambda name: diagnoses.of(shown.soft, JobView(shown.view, shown.keys.job(name)))  # type: ignore[method-assign]  # as a replica does
    streams = Streams(source=shown, resources=Resources(shown))
    paths = ("", "/ranks", "/heatmap", "/history", "/barriers", "/checkpoints")
    query = "&".join(f"watch=/jobs/{job}{path}" for path in paths)
    ended, sent = asyncio.Event(), [0]

    async def receive() -> dict[str, Any]:
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent[0] += len(message.get("body", b""))

    async def view() -> None:
        scope = {"query_string": query.encode(), "headers": []}
        await streams.serve(
            scope,
            receive,
            send,
            find=streams.resources.find,
            exempt=lambda: None,
            end=lambda: None,
            review_s=20.0,
        )

    async def work() -> float:
        spent_s = 0.0
        for step in range(1, SECONDS + 1):
            began = time.process_time()
            report(shown, job, step)
            shown.charts.sample(shown.board, loop.time())
            spent_s += time.process_time() - began
            await asyncio.sleep(1)
        return spent_s

    idle = await work()
    began = time.process_time()
    tasks = [asyncio.create_task(view()) for _ in range(VIEWERS)]
    own = await work()
    took = time.process_time() - began - own
    ended.set()
    await asyncio.gather(*tasks)
    print(
        f"sent {sent[0] / SECONDS / VIEWERS / 1e3:.0f} kB a second to each viewer; reports alone {idle / SECONDS:.3f} of a core"
    )
    return took / SECONDS


async def measure() -> dict[str, Any]:
    shown = Shown()
    shown.lead()
    megabytes, record_s = await memory(shown)
    core = await viewers(Shown())
    return {
        "benchmark": "charts",
        "jobs": JOBS,
        "ranks": RANKS,
        "memory_mb": round(megabytes, 1),
        "record_core": round(record_s, 4),
        "viewers_core": round(core, 4),
        "goal": f"three viewers of {RANKS} ranks take at most {GOAL_CORE:.0%} of a core",
        "met": core <= GOAL_CORE,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure())
    if args.json:
        args.json.write_text(json.dumps(found))
    print(
        f"charts: {found['memory_mb']} MB for {JOBS} jobs of {RANKS} ranks, recorded at {found['record_core']:.1%} of a"
        f" core; three viewers of {RANKS} ranks take {found['viewers_core']:.1%} of a core ({found['goal']})"
    )


if __name__ == "__main__":
    main()
