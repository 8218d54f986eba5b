"""`strata members`: a job's members, their ranks, and the ranks' progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.console.credentials import connecting
from strata.cli.console.output import (
    DEFAULT_ENDPOINTS,
    DEFAULT_TIMEOUT_S,
    Endpoints,
    Job,
    Json,
    TimeoutS,
    age,
    print_json,
    print_table,
    printable,
    ranks,
    size,
)
from strata.config import Credentials

if TYPE_CHECKING:
    from strata.client import CoordinatorClient
    from strata.v1.members_pb2 import DeviceStatus, Member, RankProgress
    from strata.v1.worlds_pb2 import WorldMember


@connecting
def members(
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    job: Job = "default",
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show the stacks of ranks that stand still, too.")
    ] = False,
    devices: Annotated[bool, typer.Option("--devices", help="Show the members' accelerators, too.")] = False,
    *,
    credentials: Credentials,
) -> None:
    """Show the members of a job, their ranks and how far each rank is.

    Example: strata members --job gpt
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(
        endpoints, job=job, timeout_s=timeout_s, credentials=credentials
    ) as client:
        listed = client.members()
        if as_json:
            print_json(listed)
            return
        world = client.world()
        ended = _ended(client, listed, world.members)
    places = {(m.worker_id, m.incarnation): m for m in world.members}
    rows: list[tuple[object, ...]] = []
    for member in listed:
        place = places.get((member.worker_id, member.incarnation))
        report_age_ms = min((r.age_ms for r in member.ranks), default=None)
        rows.append(
            (
                member.worker_id,
                member.host,
                _ranks(member, place),
                _span([r.step for r in member.ranks]),
                _doing(member.ranks),
                "-" if report_age_ms is None else f"{age(report_age_ms)} ago",
                member.incarnation,
            )
        )
    here = len(rows)
    rows += [(m.worker_id, "-", _ranks_of(m), "-", "done", "-", m.incarnation) for m in ended]
    generation = world.world.generation or "none"
    print_table(
        f"job {job}: generation {generation}, {world.world.size} ranks"
        + (f" ({world.world.reason})" if world.world.reason else ""),
        ("MEMBER", "HOST", "RANKS", "STEP", "PHASE", "SEEN", "INCARNATION"),
        rows,
        empty=f"job {job} has no members",
        dim_from=here,
    )
    if devices:
        _show_devices(listed)
    if stacks:
        _show_stacks(listed)


def _ended(
    client: CoordinatorClient, listed: Sequence[Member], world: Sequence[WorldMember]
) -> list[WorldMember]:
    """Return the ended members of a done job's last generation; none if the job is not done."""
    from strata.v1.worlds_pb2 import JOB_PHASE_DONE  # noqa: PLC0415  # grpc only when a command needs it

    here = {(member.worker_id, member.incarnation) for member in listed}
    ended = [member for member in world if (member.worker_id, member.incarnation) not in here]
    return ended if ended and client.job_status().phase == JOB_PHASE_DONE else []


def _ranks_of(place: WorldMember) -> str:
    return ranks(range(place.first_rank, place.first_rank + place.slots))


def _ranks(member: Member, place: WorldMember | None) -> str:
    """Return a member's ranks, and whether the member has been requested to leave."""
    if place is None:
        return "leaving" if member.leaving else "standby"
    mine = _ranks_of(place)
    return f"{mine}, leaving" if member.leaving else mine


def _doing(reports: Sequence[RankProgress]) -> str:
    """Return the ranks' phases, and the numbers of ranks that are stalled or cannot save."""
    phases = sorted({rank.phase for rank in reports if rank.phase})
    still = [rank for rank in reports if rank.stalled_ms]
    if still:
        longest_ms = max(rank.stalled_ms for rank in still)
        phases.append(f"STALLED: {ranks(rank.rank for rank in still)} for {age(longest_ms)}")
    held = [rank for rank in reports if rank.HasField("save_hold")]
    if held:
        longest_ms = max(rank.save_hold.held_ms + rank.age_ms for rank in held)
        phases.append(f"SAVES HELD: {ranks(rank.rank for rank in held)} for {age(longest_ms)}")
    return ", ".join(phases) or "-"


def _show_stacks(listed: Iterable[Member]) -> None:
    """Print the stacks of the stalled ranks; ranks that are furthest behind come first."""
    still = [(rank, member) for member in listed for rank in member.ranks if rank.stalled_ms]
    if not still:
        sys.stdout.write("\nno rank stands still\n")
    for rank, member in sorted(still, key=lambda each: (each[0].step, each[0].rank)):
        at = f"step {rank.step}" + (f", {printable(rank.phase)}" if rank.phase else "")
        sys.stdout.write(
            f"\nrank {rank.rank} of {member.worker_id} stands still at {at} for {age(rank.stalled_ms)}\n"
        )
        for line in rank.stack.splitlines() or ["  no stack: it does not use the library"]:
            sys.stdout.write(printable(line) + "\n")
        if rank.trace_file:
            where = f"{printable(rank.trace_file)} ({size(rank.trace_bytes)})"
            sys.stdout.write(f"its communication was recorded on {printable(member.host)}: {where}\n")


def _show_devices(listed: Iterable[Member]) -> None:
    print_table(
        "",
        ("MEMBER", "DEVICE", "NAME", "BUSY", "MEMORY", "TEMPERATURE", "POWER", "ECC", "XIDS", "HEALTH"),
        [
            (
                member.worker_id,
                device.index,
                device.name or "-",
                _given(device, "utilization_percent", lambda value: f"{value} %"),
                _memory(device),
                _given(device, "temperature_c", lambda value: f"{value} °C"),
                _given(device, "power_mw", lambda value: f"{value / 1000:.0f} W"),
                _given(device, "ecc_uncorrected", str),
                ", ".join(map(str, device.xids[-5:])) or "-",
                device.fault or "healthy",
            )
            for member in listed
            for device in member.device_status
        ],
        empty="\nno member has reported an accelerator",
    )


def _given(device: DeviceStatus, field: str, words: Callable[[int], str]) -> str:
    """Return a reading as text, or a dash if the driver does not provide it."""
    return words(getattr(device, field)) if device.HasField(field) else "-"  # type: ignore[arg-type]  # a field's name


def _memory(device: DeviceStatus) -> str:
    total = _given(device, "memory_total_bytes", size)
    return _given(device, "memory_used_bytes", lambda used: f"{size(used)} of {total}")


def _span(steps: list[int]) -> str:
    """Return the range of the ranks' steps, from the slowest rank to the fastest; a single step if all ranks
    are at the same step.
    """
    if not steps:
        return "-"
    slowest, fastest = min(steps), max(steps)
    return str(slowest) if slowest == fastest else f"{slowest}-{fastest}"
