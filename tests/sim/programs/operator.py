"""The operator: scales, pauses, resumes, preempts and drains the job amid the faults.

Only some seeds have an operator (`is_operated`), so that its addition did not change the runs of the other seeds.
A request goes to the replica's code that serves unary calls. After the faults the operator restores the limits,
and the job runs.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from strata.core.job import JobView
from strata.errors import StrataError
from strata.v1.worlds_pb2 import (
    STOP_ACTION_DRAIN,
    STOP_ACTION_PAUSE,
    STOP_ACTION_PREEMPT,
    ResumeJobRequest,
    ScaleJobRequest,
    StopJobRequest,
)
from tests.sim.cluster import Cluster
from tests.sim.programs.members import JOB, SPEC

GRACE_S = 5.0
GRACE_MS = 3000


def is_operated(seed: int) -> bool:
    """Return whether this seed has an operator."""
    return seed % 3 == 2


class Operator:
    """Sends one request after another to any running replica."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng

    async def run(self) -> None:
        """Send requests until cancelled."""
        acts = (self._scale, self._scale, self._pause, self._preempt, self._drain, self._drain)
        while True:
            await asyncio.sleep(self._rng.choice((self._rng.uniform(0, 2), self._rng.uniform(3, 9))))
            await self._rng.choice(acts)()

    async def put_back(self) -> None:
        """Return once the job's limits are restored and the job is not paused."""
        job = self._cluster.judge.job
        while True:
            await self._request("resume_job", ResumeJobRequest(job=JOB))
            await self._request(
                "scale_job",
                ScaleJobRequest(job=JOB, min_workers=SPEC.min_workers, max_workers=SPEC.max_workers),
            )
            view = JobView(self._cluster.judge.view, job)
            spec = view.spec()
            limits = None if spec is None else (spec.record.min_workers, spec.record.max_workers)
            head = view.head()
            notice = None if head is None else view.notice(head.record.generation)
            if (
                limits == (SPEC.min_workers, SPEC.max_workers)
                and view.phase().value == "running"
                and notice is None
            ):
                return
            await asyncio.sleep(1.0)

    # -- requests

    async def _scale(self) -> None:
        least, most = self._rng.choice((2, 4)), self._rng.choice((5, 8, 12))
        await self._request("scale_job", ScaleJobRequest(job=JOB, min_workers=least, max_workers=most))

    async def _pause(self) -> None:
        now = self._rng.random() < 0.3
        await self._stop(STOP_ACTION_PAUSE, now=now)
        for _ in range(self._rng.randrange(1, 5)):
            await asyncio.sleep(self._rng.uniform(0.2, 3))
            if await self._request("resume_job", ResumeJobRequest(job=JOB)):
                return

    async def _preempt(self) -> None:
        await self._stop(STOP_ACTION_PREEMPT, now=self._rng.random() < 0.2)

    async def _drain(self) -> None:
        world = JobView(self._cluster.judge.view, self._cluster.judge.job).world()
        if world is None or not world.members:
            return
        count = min(len(world.members), self._rng.randrange(1, 3))
        workers = self._rng.sample([member.worker for member in world.members], count)
        await self._stop(STOP_ACTION_DRAIN, *workers, now=self._rng.random() < 0.2)

    async def _stop(self, action: Any, *workers: str, now: bool) -> None:
        request = StopJobRequest(
            job=JOB, action=action, worker_ids=workers, reason="asked", grace_ms=GRACE_MS, now=now
        )
        if await self._request("stop_job", request) and now:
            return
        if self._rng.random() < 0.2:  # an impatient operator repeats the request with `now`
            await asyncio.sleep(self._rng.uniform(0, 1))
            request.now = True
            await self._request("stop_job", request)

    async def _request(self, name: str, request: Any) -> bool:
        """Send a request to some replica; return whether the replica confirmed.

        An unconfirmed request may still take effect.
        """
        there = [
            replica
            for replica in self._cluster.replicas.values()
            if replica.alive and not replica.process.frozen and replica.serving is not None
        ]
        if not there:
            return False
        replica = self._rng.choice(there)
        self._cluster.trace.note("operator", f"{name} at {replica.name}")
        try:
            async with asyncio.timeout(GRACE_S):
                await replica.service.calls.answer(name, request, None)
        except (StrataError, TimeoutError) as error:
            self._cluster.trace.note("operator", f"{name}: {error!r}")
            return False
        self._cluster.trace.count(f"confirmed {name}")
        return True
