"""Drains this member from its job when one of its devices has failed for good.

A stop notice makes the ranks of the generation agree on a step and save it. Then this member leaves, with
the exit code that tells a scheduler to requeue the member on another node. The other members go on. A member
that has no rank (it is a standby, or there is no world) cannot be drained: it leaves by itself before it gets a
place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from strata.agent.health.devices import DeviceWatch, OpenDevices, open_devices
from strata.agent.health.traces import trace_environment
from strata.client.rank.stall_watch import kept
from strata.config import HealthConfig
from strata.core.health.devices import fault
from strata.errors import Refused, StrataError
from strata.observe import get_logger
from strata.v1.members_pb2 import DeviceStatus
from strata.v1.worlds_pb2 import StopJobRequest
from strata.wire.worlds import stop_message

log = get_logger()

ASK_S: Final = 30.0
AGAIN_S: Final = 15.0
"""How often the drain is requested again. A request has no effect if no coordinator answers, or if the
generation has another notice already: a generation has at most one notice.
"""


class Upstream(Protocol):
    """The part of the session with the coordinators that the drain needs."""

    def devices(self, devices: Sequence[DeviceStatus]) -> None:
        """Report the state of this member's accelerators."""
        ...

    def call(self, request: Message, *, timeout_s: float | None) -> Awaitable[Any]:
        """Return the response to `request`, which must be of a kind that a session carries."""
        ...


async def prepare_devices(
    config: HealthConfig, job: str, environment: MutableMapping[str, str]
) -> OpenDevices | None:
    """Return this node's devices; None if there are none, or `config.devices` is false.

    If there are devices, add to `environment` the variables that make ranks record their collectives. The ranks
    inherit `environment`. `Refused` if a device has failed already: this node would join only to be drained.
    """
    if not config.devices:
        return None
    devices = await open_devices(environment.get("CUDA_VISIBLE_DEVICES"))
    if devices is None:
        return None
    environment.update(trace_environment(_made(config.traces, job), environment))
    for reading in await devices.thread.call(devices.reader.read):
        why = fault(reading, reading, ignored=config.ignored())
        if why and config.drain_on_fault:
            devices.thread.stop()
            raise Refused(
                f"device {reading.index} of this node cannot be used: {why}",
                hint="use another node; run.drain_on_fault = false uses it anyway, --no-devices checks none",
            )
    return devices


def _made(traces: str, job: str) -> Path:
    """Make and return the folder of a job's recordings."""
    folder = Path(traces, job).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@asynccontextmanager
async def watching_devices(
    devices: OpenDevices | None,
    config: HealthConfig,
    upstream: Upstream,
    *,
    job: str,
    worker_id: str,
    grace_s: float,
    on_unfit: Callable[[str], None],
) -> AsyncIterator[None]:
    """Report the devices inside the block, and drain this member when one fails.

    The ranks have `grace_s` for their save. `on_unfit` gets the reason why this member must not get a place any more.
    """
    if devices is None:
        yield
        return
    tasks: list[asyncio.Task[None]] = []

    def failed(reason: str) -> None:
        if config.drain_on_fault:
            on_unfit(reason)
            request = stop_message(job, reason, grace_s=grace_s, leaving=[worker_id])
            tasks.append(asyncio.create_task(_drain(upstream, request), name="drain this member"))

    watch = DeviceWatch(
        devices,
        tell=upstream.devices,
        on_fault=failed,
        telemetry_s=config.telemetry_s,
        ignored_xids=config.ignored(),
    )
    tasks.append(asyncio.create_task(kept(watch.run, log), name="watch over devices"))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        devices.thread.stop()


async def _drain(upstream: Upstream, request: StopJobRequest) -> None:
    """Request the drain of this member every `AGAIN_S`, until the end of the agent cancels this task."""
    while True:
        try:
            await upstream.call(request, timeout_s=ASK_S)
            log.warning("devices.draining", reason=request.reason)
        except StrataError as error:
            log.warning("devices.not_drained", reason=error.message)
        await asyncio.sleep(AGAIN_S)
