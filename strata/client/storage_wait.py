"""A member that begins waits until its job's checkpoints can be written, before it registers.

A job whose storage is full, or does not answer, would train in vain: it holds its saves, stops when its
grace is over, is started again, and so on. So a member looks first:

    1. It asks a coordinator for the job and its newest checkpoint. Without one, or of a job that has ended
       and is not taken up, it does not wait. Nor does it when no coordinator answers within `ASK_S`.
    2. It writes a small object beside that checkpoint, and removes it. If that works, or fails for a reason
       that only somebody can mend, it does not wait.
    3. Else it says why, tries again after 1 s, 2 s … 30 s, and from 1 on each time: others may end the job.

It is no member meanwhile, so nobody waits for it, and no generation begins with it.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from strata.errors import StrataError
from strata.observe.words import age
from strata.v1.checkpoints_pb2 import GetCheckpointRequest
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED, GetJobRequest

ASK_S: Final = 3.0
ATTEMPT_S: Final = 1.5
"""How long the coordinators have to answer, and each of them; a member that finds none registers as ever."""
FIRST_S: Final = 1.0
MOST_S: Final = 30.0
SAY_S: Final = 300.0
"""How often it is said again for what is waited."""

Say = Callable[[str], None]
Refusal = Callable[[str], Awaitable[str]]
"""Returns why nothing can be written at a folder's URI that time may heal; "" for anything else."""


class Unary(Protocol):
    """What this needs of a client of the coordinators."""

    async def call(self, request: Message, *, timeout_s: float, attempt_s: float) -> Any:
        """Return the response to a unary request."""
        ...


async def in_thread(uri: str) -> str:
    """Return `refusal` of a storage that may never answer: its thread keeps no process from ending."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[str] = loop.create_future()

    def tell(why: str) -> None:
        if not told.done():
            told.set_result(why)

    def probe() -> None:
        from strata.checkpoint.probe import refusal  # noqa: PLC0415  # most members that begin need none of it

        why = refusal(uri, nonce=lambda: uuid.uuid4().hex)
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, why)

    threading.Thread(target=probe, name="strata-storage-probe", daemon=True).start()
    return await told


async def wait_for_storage(
    unary: Unary, *, job: str, taken_up: bool, say: Say, over: Say, refuses: Refusal = in_thread
) -> None:
    """Return once this job's checkpoints can be written, or there is nothing to wait for.

    `taken_up`: a job that has ended goes on with this member. `say` is told for what it waits, when that
    begins, when it becomes another reason, and every five minutes; `over` once, when it has waited.
    """
    clock = asyncio.get_running_loop().time
    began_s, delay_s, told, told_s = clock(), FIRST_S, "", 0.0
    while True:
        where = await _saved_at(unary, job, taken_up=taken_up)
        why = await refuses(where) if where else ""
        if not why:
            break
        if why != told or clock() - told_s >= SAY_S:
            told, told_s = why, clock()
            since = f", for {age(1000 * (clock() - began_s))} by now" if clock() - began_s >= 1 else ""
            say(f"no checkpoint can be written to {where}: {why}; waiting for that before it joins{since}")
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, MOST_S)
    if told:
        over(f"waited {age(1000 * (clock() - began_s))} for the storage ({told}), and joins now")


async def _saved_at(unary: Unary, job: str, *, taken_up: bool) -> str:
    """Return the URI of the job's folder of checkpoints; "" without one to wait for, or where nobody answers."""
    try:
        phase = (await unary.call(GetJobRequest(job=job), timeout_s=ASK_S, attempt_s=ATTEMPT_S)).job.phase
        if phase in {JOB_PHASE_DONE, JOB_PHASE_FAILED} and not taken_up:
            return ""
        found = await unary.call(
            GetCheckpointRequest(job=job, latest=True), timeout_s=ASK_S, attempt_s=ATTEMPT_S
        )
        if found.checkpoint.origin_job:  # its bytes are those of another job, which this one does not write
            return ""
        folder: str = found.checkpoint.path
        return folder.rstrip("/").rpartition("/")[0]
    except StrataError:
        return ""
