"""What is wrong with a job, as data of its page: ranks that stand still, held saves, slow ranks, devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from strata.coordinator.diagnosis import diagnose_world, world_devices
from strata.core.findings import Diagnosis
from strata.core.job import JobView, World
from strata.core.stalls import is_outlier
from strata.dashboard.source import Source
from strata.v1.members_pb2 import DeviceStatus as DeviceMessage
from strata.v1.members_pb2 import RankProgress

STALLS: Final = 20
HELD: Final = 20
DEVICES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StallStatus:
    """A rank that stands still. `suspect`: it seems to hold up the others."""

    rank: int
    worker_id: str
    step: int
    phase: str
    stalled_ms: int
    suspect: bool
    stack: str
    trace_file: str
    trace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStatus:
    """A rank that trains on and cannot save `step`, for a reason that time may heal."""

    rank: int
    worker_id: str
    step: int
    held_s: float
    reason: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStatus:
    """A rank whose steps are slow: against those of other ranks, or the last one against its own."""

    rank: int
    worker_id: str
    step_s: float
    median_step_s: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """An accelerator of a member; None for what its driver does not offer."""

    worker_id: str
    index: int
    name: str
    uuid: str
    utilization_percent: int | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: int | None
    power_mw: int | None
    ecc_uncorrected: int | None
    xids: tuple[int, ...]
    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubleStatus:
    """`says` is the sentence that commands show, too; empty when nothing is known to be wrong."""

    says: str = ""
    how: str = ""
    stalled_count: int = 0
    stalled: tuple[StallStatus, ...] = ()
    """The first `STALLS`, suspects first."""
    held_count: int = 0
    held: tuple[HeldStatus, ...] = ()
    """The first `HELD`, the one that cannot save for longest first."""
    slow: tuple[SlowStatus, ...] = ()
    devices: tuple[DeviceStatus, ...] = ()
    """The first `DEVICES`, sick ones first."""
    device_count: int = 0


def trouble_status(
    source: Source, job: JobView, world: World | None, said: dict[int, RankProgress]
) -> TroubleStatus:
    """Return what is wrong with a job whose ranks said `said`."""
    if world is None or source.soft is None:
        return TroubleStatus()
    found = diagnose_world(source.soft, job, said.values(), world)
    devices = sorted(
        world_devices(source.soft, job.keys.name, world),
        key=lambda each: (not each[1].fault, each[0], each[1].index),
    )
    stalled = sorted(found.stalled, key=lambda each: (each.rank not in found.suspects, each.step, each.rank))
    return TroubleStatus(
        says=found.says,
        how=found.how,
        stalled_count=len(stalled),
        stalled=tuple(_stall(world, said[each.rank], found) for each in stalled[:STALLS]),
        held_count=len(found.held),
        held=tuple(_held(world, found))[:HELD],
        slow=tuple(_slow(world, said, found))[:STALLS],
        devices=tuple(_device(worker, device) for worker, device in devices[:DEVICES]),
        device_count=len(devices),
    )


def _stall(world: World, progress: RankProgress, found: Diagnosis) -> StallStatus:
    return StallStatus(
        rank=progress.rank,
        worker_id=_owner(world, progress.rank),
        step=progress.step,
        phase=progress.phase,
        stalled_ms=progress.stalled_ms,
        suspect=progress.rank in found.suspects,
        stack=progress.stack,
        trace_file=progress.trace_file,
        trace_bytes=progress.trace_bytes,
    )


def _held(world: World, found: Diagnosis) -> Iterable[HeldStatus]:
    for word in found.held:
        if word.hold is not None:
            yield HeldStatus(
                rank=word.rank,
                worker_id=_owner(world, word.rank),
                step=word.hold.step,
                held_s=word.hold.held_s,
                reason=word.hold.reason,
                host=word.hold.host,
            )


def _slow(world: World, said: dict[int, RankProgress], found: Diagnosis) -> Iterable[SlowStatus]:
    for slow in found.slow:
        progress = said[slow.rank]
        why = f"{slow.times:.1f} times the median of all ranks"
        yield _slow_status(world, progress, why)
    named = {slow.rank for slow in found.slow}
    for rank, progress in sorted(said.items()):
        if rank not in named and is_outlier(progress.step_us, progress.median_step_us):
            times = progress.step_us / progress.median_step_us
            yield _slow_status(world, progress, f"its last step took {times:.1f} times its own median")


def _slow_status(world: World, progress: RankProgress, why: str) -> SlowStatus:
    return SlowStatus(
        rank=progress.rank,
        worker_id=_owner(world, progress.rank),
        step_s=progress.step_us / 1e6,
        median_step_s=progress.median_step_us / 1e6,
        why=why,
    )


def _owner(world: World, rank: int) -> str:
    try:
        return world.member_of(rank).worker
    except LookupError:
        return ""


def _device(worker: str, device: DeviceMessage) -> DeviceStatus:
    def read(field: str) -> int | None:
        return int(getattr(device, field)) if device.HasField(field) else None  # type: ignore[arg-type]  # by name

    return DeviceStatus(
        worker_id=worker,
        index=device.index,
        name=device.name,
        uuid=device.uuid,
        utilization_percent=read("utilization_percent"),
        memory_used_bytes=read("memory_used_bytes"),
        memory_total_bytes=read("memory_total_bytes"),
        temperature_c=read("temperature_c"),
        power_mw=read("power_mw"),
        ecc_uncorrected=read("ecc_uncorrected"),
        xids=tuple(device.xids),
        fault=device.fault,
    )
