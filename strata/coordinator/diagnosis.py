"""What is wrong with a job, from what this replica knows: asked by the status page, GetJob and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from strata.core.arrivals import OpenRound
from strata.core.checkpoints import COMPARE_BARRIER
from strata.core.findings import Diagnosis, RankReport, diagnose
from strata.core.job import JobView, World
from strata.core.save_hold import SaveHold
from strata.core.stalls import innermost
from strata.v1.members_pb2 import DeviceStatus, MemberDevices, RankProgress


class Told(Protocol):
    """What ranks and members told a replica."""

    def open_rounds(self, job: str) -> Iterator[OpenRound]:
        """Yield the rounds of a job that are open as far as is known here."""
        ...

    def progress(self, job: str, generation: int, ranks: Iterable[int]) -> list[RankProgress]:
        """Return what is known of these ranks; those that said nothing are absent."""
        ...

    def devices(self, job: str) -> Iterator[MemberDevices]:
        """Yield what is known of the accelerators of the job's members, gone ones perhaps included."""
        ...

    def violations(self, job: str) -> Sequence[str]:
        """Return what the job's keys say and cannot be."""
        ...


def diagnose_job(told: Told, job: JobView) -> Diagnosis:
    """Return what is wrong with a job's keys, and with the ranks and devices of its current world."""
    world = job.world()
    if world is None:
        return diagnose((), {}, told.violations(job.keys.name))
    head = world.head
    return diagnose_world(told, job, told.progress(job.keys.name, head.generation, range(head.size)), world)


def diagnose_world(told: Told, job: JobView, said: Iterable[RankProgress], world: World) -> Diagnosis:
    """The same, of what ranks said, when that is known already."""
    name, generation, latest = job.keys.name, world.head.generation, job.latest()
    waiting = {
        rank
        for round_ in told.open_rounds(name)
        # a save in the background holds no training up
        if round_.key.generation == generation and round_.key.name != COMPARE_BARRIER
        for rank in round_.arrived
    }
    words = [
        RankReport(
            rank=each.rank,
            step=each.step,
            phase=each.phase,
            age_ms=each.age_ms,
            stalled_ms=each.stalled_ms,
            median_step_us=each.median_step_us,
            waits=each.rank in waiting,
            where=innermost(each.stack),
            hold=_hold(each),
        )
        for each in said
    ]
    faults = {(worker, device.index): device.fault for worker, device in world_devices(told, name, world)}
    return diagnose(
        words,
        faults,
        told.violations(name),
        committed_step=latest.record.step if latest is not None else None,
    )


def _hold(said: RankProgress) -> SaveHold | None:
    """Return why a rank cannot save, and for how long by now: it said so `age_ms` ago."""
    if not said.HasField("save_hold"):
        return None
    held = said.save_hold
    return SaveHold(
        step=held.step, reason=held.reason, host=held.host, held_s=(held.held_ms + said.age_ms) / 1000
    )


def world_devices(told: Told, name: str, world: World) -> Iterator[tuple[str, DeviceStatus]]:
    """Yield the devices of the members of this world, with the worker that has them."""
    here = {(member.worker, member.incarnation) for member in world.members}
    for member in told.devices(name):
        if (member.worker_id, member.incarnation) in here:
            for device in member.devices:
                yield member.worker_id, device
