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
import concurrent.futures
import threading
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from strata.checkpoint.transient import SILENT
from strata.errors import StrataError
from strata.observe.words import age
from strata.v1.checkpoints_pb2 import GetCheckpointRequest
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED, GetJobRequest

ASK_S: Final = 3.0
ATTEMPT_S: Final = 1.5
"""How long the coordinators have to answer, and each of them; a member that finds none registers as ever."""
FIRST_S: Final = 1.0
MOST_S: Final = 30.0
ANSWER_S: Final = 60.0
"""Longer than a client of S3 tries by itself."""
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
    told: concurrent.futures.Future[str] = concurrent.futures.Future()
    told.set_running_or_notify_cancel()  # whoever stops waiting does not take it from the thread

    def probe() -> None:
        from strata.checkpoint.probe import refusal  # noqa: PLC0415  # most members that begin need none of it

        try:
            told.set_result(refusal(uri, nonce=lambda: uuid.uuid4().hex))
        except Exception as error:  # noqa: BLE001  # it is the waiter's, who gets it
            told.set_exception(error)

    threading.Thread(target=probe, name="strata-storage-probe", daemon=True).start()
    return await asyncio.wrap_future(told)


async def wait_for_storage(
    unary: Unary, *, job: str, taken_up: bool, say: Say, over: Say, refuses: Refusal = in_thread
) -> None:
    """Return once this job's checkpoints can be written, or there is nothing to wait for.

    `taken_up`: a job that has ended goes on with this member. `say` is told for what it waits, when that
    begins, when it becomes another reason, and every five minutes; `over` once, when it has waited.
    """
    clock = asyncio.get_running_loop().time
    began_s, delay_s, told, told_s = clock(), FIRST_S, "", 0.0

    def tell(where: str, why: str) -> None:
        nonlocal told, told_s
        if why != told or clock() - told_s >= SAY_S:
            told, told_s = why, clock()
            since = f", for {age(1000 * (clock() - began_s))} by now" if clock() - began_s >= 1 else ""
            say(f"no checkpoint can be written to {where}: {why}; waiting for that before it joins{since}")

    while True:
        where = await _saved_at(unary, job, taken_up=taken_up)
        if not where:
            break
        why = await _patiently(refuses(where), silent=partial(tell, where, SILENT))
        if not why:
            break
        tell(where, why)
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, MOST_S)
    if told:
        over(f"waited {age(1000 * (clock() - began_s))} for the storage ({told}), and joins now")


async def _patiently(answer: Awaitable[str], *, silent: Callable[[], None]) -> str:
    """Return the answer; call `silent` each time that none has come for `ANSWER_S`: a dead mount never answers."""
    waiting = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait({waiting}, timeout=ANSWER_S))[0]:
            silent()
        return waiting.result()
    finally:
        waiting.cancel()


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
