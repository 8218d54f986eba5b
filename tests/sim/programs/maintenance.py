"""Checkpoint maintenance by people and hosts: policy, pins, tags, readers, copies, maintenance tasks, damage.

Some seeds have maintenance (`is_kept`); in these seeds the trainers also save Incrementals. Requests go to a
replica's table of calls, as a unary call does, amid the faults. An unconfirmed request may have taken effect; a
program that needs its effect repeats the request.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState
from strata.errors import StrataError
from strata.v1 import checkpoints_pb2 as pb
from strata.v1.retention_pb2 import Keep, Retention, SetRetentionRequest
from tests.sim.cluster import Cluster
from tests.sim.programs.members import JOB

GRACE_S = 5.0
MIN_GOOD = 2
"""Damage is reported only while so many checkpoints are good, and never of the latest: a job without a good
checkpoint fails."""


def is_kept(seed: int) -> bool:
    """Return whether this seed has checkpoint maintenance and damage."""
    return seed % 3 == 0


class Maintainer:
    """Sends one request after another to any running replica."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._readers = 0

    async def run(self) -> None:
        """Send requests until cancelled."""
        acts = (
            self._policy,
            self._pin,
            self._tag,
            self._read,
            self._read,
            self._delete,
            self._copy,
            self._tasks,
            self._tasks,
            self._tasks,
            self._damage,
            self._rewind,
        )
        await self._policy()
        while True:
            await asyncio.sleep(self._rng.uniform(0, 1.5))
            await self._rng.choice(acts)()

    # -- requests

    async def _policy(self) -> None:
        keep = Keep(latest=self._rng.choice((1, 2, 3)), every_steps=self._rng.choice((0, 0, 16)))
        request = SetRetentionRequest(job=JOB, retention=Retention(keep=keep, who="maintainer"))
        await self._request("set_retention", request)

    async def _pin(self) -> None:
        for record in self._some(CheckpointState.COMMITTED):
            if self._rng.random() < 0.4:
                await self._request("pin_checkpoint", pb.PinCheckpointRequest(**_which(record), who="k"))
            else:
                await self._request("unpin_checkpoint", pb.UnpinCheckpointRequest(**_which(record)))

    async def _tag(self) -> None:
        tag = self._rng.choice(("a", "b"))
        for record in self._some(CheckpointState.COMMITTED):
            if self._rng.random() < 0.6:
                await self._request("tag_checkpoint", pb.TagCheckpointRequest(**_which(record), tag=tag))
            else:
                await self._request("untag_checkpoint", pb.UntagCheckpointRequest(job=JOB, tag=tag))

    async def _read(self) -> None:
        """Read a checkpoint for a while; half of the readers die and leave their lease to expire."""
        for record in self._some(CheckpointState.COMMITTED):
            self._readers += 1
            reader = f"reader-{self._readers}"
            opening = pb.OpenCheckpointRequest(**_which(record), reader=reader, ttl_s=5)
            if not await self._request("open_checkpoint", opening):
                return
            for _ in range(self._rng.randrange(3)):
                await asyncio.sleep(self._rng.uniform(0.1, 1.5))
                await self._request("open_checkpoint", opening)
            if self._rng.random() < 0.5:
                closing = pb.CloseCheckpointRequest(**_which(record), reader=reader)
                await self._request("close_checkpoint", closing)

    async def _delete(self) -> None:
        for record in self._some(CheckpointState.COMMITTED):
            tier = self._rng.choice(("", "", *record.tiers))
            await self._request("delete_checkpoint", pb.DeleteCheckpointRequest(**_which(record), tier=tier))

    async def _copy(self) -> None:
        """Copy every part of a checkpoint to a further tier, in any order; some copies are never finished."""
        for record in self._some(CheckpointState.COMMITTED):
            parts: list[int | None] = [*range(record.ranks), None]
            self._rng.shuffle(parts)
            if self._rng.random() < 0.2:
                parts.pop()
            for rank in parts:
                digest = f"digest-{record.attempt}" + ("" if rank is None else f"-{rank}")
                await self._request(
                    "report_copy",
                    pb.ReportCopyRequest(
                        **_which(record),
                        tier="s3",
                        root="s3://far",
                        rank=rank or 0,
                        sealed=rank is None,
                        digest=digest,
                    ),
                )

    async def _tasks(self) -> None:
        """Carry out due tasks as a host does; for each it may die before reporting the end."""
        answer = await self._request("list_maintenance", pb.ListMaintenanceRequest(job=JOB, host="host"))
        for task in answer.tasks if answer else ():
            if task.kind == pb.MAINTENANCE_KIND_VERIFY or self._rng.random() < 0.2:
                continue
            request = pb.DeleteCheckpointRequest(job=JOB, step=task.step, attempt=task.attempt)
            if task.kind == pb.MAINTENANCE_KIND_CLEAR and not await self._request(
                "delete_checkpoint", request
            ):
                continue
            request.finished, request.tier = True, task.tier
            await self._request("delete_checkpoint", request)

    async def _damage(self) -> None:
        job = self._job()
        good = [e for e in job.checkpoints() if e.record.state is CheckpointState.COMMITTED]
        hosts = sorted({worker.record.host for worker in job.workers()} - {""})
        if len(good) < MIN_GOOD or len(hosts) < 2:
            return
        latest = job.latest()
        for record in self._some(CheckpointState.COMMITTED):
            if latest is None or latest.record.attempt == record.attempt:
                return
            for host in self._rng.sample(hosts, self._rng.choice((1, 2, 2))):
                report = pb.ReportDamageRequest(
                    **_which(record),
                    host=host,
                    reason="a bit",
                    sound=self._rng.random() < 0.2,
                )
                await self._request("report_damage", report)

    async def _rewind(self) -> None:
        if self._rng.random() < 0.6:
            return
        for record in self._some(CheckpointState.COMMITTED):
            await self._request("rewind_job", pb.RewindJobRequest(**_which(record), who="maintainer"))

    # -- inside

    def _job(self) -> JobView:
        return JobView(self._cluster.judge.view, self._cluster.judge.job)

    def _some(self, state: CheckpointState) -> Iterator[CheckpointRecord]:
        """Yield one random record in that state, if there is any."""
        records = [e.record for e in self._job().checkpoints() if e.record.state is state]
        if records:
            yield self._rng.choice(records)

    async def _request(self, name: str, request: Any) -> Any:
        """Send a request to some replica; return its answer, or None."""
        there = [
            replica
            for replica in self._cluster.replicas.values()
            if replica.alive and not replica.process.frozen and replica.serving is not None
        ]
        if not there:
            return None
        replica = self._rng.choice(there)
        self._cluster.trace.note("maintainer", f"{name} at {replica.name}")
        try:
            async with asyncio.timeout(GRACE_S):
                answer = await replica.service.calls.answer(name, request, None)
        except (StrataError, TimeoutError) as error:
            self._cluster.trace.note("maintainer", f"{name}: {error!r}")
            return None
        self._cluster.trace.count(f"confirmed {name}")
        return answer


def _which(record: CheckpointRecord) -> dict[str, Any]:
    return {"job": JOB, "step": record.step, "attempt": record.attempt}
