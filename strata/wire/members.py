"""Members: registrations as core values, workers as messages for display."""

from __future__ import annotations

from collections.abc import Iterable

from strata.core.health.devices import DeviceReading
from strata.core.ids import BootId, WorkerId
from strata.core.kv.records import Command, Worker
from strata.core.kv.view import Entry
from strata.core.members.registration import Registration
from strata.v1 import members_pb2
from strata.wire.worlds import spec_record


def registration(message: members_pb2.Registration) -> Registration:
    """Return a member's registration; the message also names its job, which is not part of the result."""
    return Registration(
        worker=WorkerId(message.worker_id),
        boot=BootId(message.boot),
        host=message.host,
        slots=message.slots or 1,
        devices=tuple(message.devices),
        pid=message.pid,
        spec=spec_record(message.spec),
        incarnation=message.incarnation,
        resume=message.resume,
        attempt=message.attempt,
        anew=message.begin_anew,
        cannot_restart=message.cannot_restart,
        command=_command(message.command) if message.HasField("command") else None,
        run_id=message.run_id,
        sole=message.sole,
    )


def _command(message: members_pb2.Command) -> Command:
    return Command(program=message.program, arguments=message.arguments, digest=message.arguments_digest)


def member_message(
    entry: Entry[Worker],
    *,
    standby: bool,
    leaving: bool,
    devices: Iterable[members_pb2.DeviceStatus],
) -> members_pb2.Member:
    """Return a worker key for display, with the last known state of its devices."""
    record = entry.record
    return members_pb2.Member(
        worker_id=entry.name,
        incarnation=entry.create_revision,
        host=record.host,
        slots=record.slots,
        devices=record.devices,
        pid=record.pid,
        served_by=record.served_by,
        standby=standby,
        leaving=leaving,
        device_status=devices,
    )


def device_message(reading: DeviceReading, fault: str) -> members_pb2.DeviceStatus:
    """Return a device's reading with its fault; values that its driver does not offer are absent."""
    return members_pb2.DeviceStatus(
        index=reading.index,
        name=reading.name,
        uuid=reading.uuid,
        utilization_percent=reading.utilization_percent,
        memory_used_bytes=reading.memory_used_bytes,
        memory_total_bytes=reading.memory_total_bytes,
        temperature_c=reading.temperature_c,
        power_mw=reading.power_mw,
        ecc_uncorrected=reading.ecc_uncorrected,
        xids=reading.xids,
        fault=fault,
        throttled=reading.throttled,
    )
