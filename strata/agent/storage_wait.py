"""Wait, before a starting member registers, until its job's checkpoints can be written.

A job whose storage is full or does not answer would train in vain: its ranks would retry their saves until the grace
is over, stop, be restarted, and so on. So a member checks first:

    1. The member asks a coordinator for the job and its newest checkpoint. It does not wait if the job has no
       checkpoint, if the job has ended and is not resumed, or if no coordinator answers within `ASK_S`.
    2. The member writes a small object beside each copy of that checkpoint, and removes it. It does not wait if
       the write to any copy works, or if it fails for a reason that only a person can repair.
    3. Otherwise it reports the reason and repeats from 1, after 1 s, 2 s … 30 s. The job may have ended meanwhile.
    4. After `limit_s` it registers anyway: it knows where the job saved so far, not where the job will save.

While it waits it is not registered, so no other member waits for it, and no generation starts with it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from strata.checkpoint.save.retry import GRACE_S
from strata.checkpoint.storage.transient import SILENT
from strata.config import TrainingConfig
from strata.errors import ConfigError, StrataError
from strata.observe.words import age
from strata.v1.checkpoints_pb2 import Checkpoint, GetCheckpointRequest
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED, GetJobRequest

if TYPE_CHECKING:
    from strata.transport.unary import UnaryClient

ASK_S: Final = 3.0
ATTEMPT_S: Final = 1.5
"""How long all coordinators together (`ASK_S`) and each single coordinator (`ATTEMPT_S`) have to answer.
Without an answer the member registers immediately.
"""
FIRST_S: Final = 1.0
MOST_S: Final = 30.0
ANSWER_S: Final = 60.0
"""How long a storage has to answer one attempt; an S3 client gives up earlier by itself. A mount that hangs blocks the
thread of each attempt (some ten in a grace of 15 minutes) until the mount answers or the process ends."""
SAY_S: Final = 300.0
"""How often an unchanged reason is reported again."""

Say = Callable[[str], None]
Refusal = Callable[[str], Awaitable[str]]
"""Returns why nothing can be written at a folder's URI, if time may cure that; otherwise ""."""


async def in_thread(uri: str) -> str:
    """Return `refusal(uri)`, called in a daemon thread: a storage that hangs must not keep the process alive."""
    answer: concurrent.futures.Future[str] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()  # a waiter that is cancelled does not cancel the thread's future

    def probe() -> None:
        from strata.checkpoint.storage.opening import refusal  # noqa: PLC0415  # most starting members do not need it

        try:
            answer.set_result(refusal(uri, nonce=lambda: uuid.uuid4().hex))
        except Exception as error:  # noqa: BLE001  # raised where the future is awaited
            answer.set_exception(error)

    threading.Thread(target=probe, name="strata-storage-probe", daemon=True).start()
    return await asyncio.wrap_future(answer)


def grace_s(environment: Mapping[str, str]) -> float:
    """Return how long a member waits: as long as its ranks retry a save that their storage refuses."""
    try:
        return TrainingConfig.load(env=environment).save_grace_s
    except ConfigError:  # the ranks report this error better, if they train with this configuration
        return GRACE_S


async def wait_for_storage(
    unary: UnaryClient,
    *,
    job: str,
    taken_up: bool,
    say: Say,
    over: Say,
    limit_s: float = GRACE_S,
    refuses: Refusal = in_thread,
) -> None:
    """Return once this job's checkpoints can be written or there is nothing to wait for, at the latest after `limit_s`.

    `taken_up`: this member resumes a job that has ended. `say` gets the reason when the wait begins, when the
    reason changes, every five minutes, and when the member gives up waiting. `over` is called once, if the
    storage became writable after a wait.
    """
    if limit_s <= 0:
        return
    clock = asyncio.get_running_loop().time
    began_s, delay_s, reported, reported_at_s = clock(), FIRST_S, "", 0.0

    def tell(why: str) -> None:
        nonlocal reported, reported_at_s
        if why != reported or clock() - reported_at_s >= SAY_S:
            reported, reported_at_s = why, clock()
            since = f", for {age(1000 * (clock() - began_s))} by now" if clock() - began_s >= 1 else ""
            say(f"no checkpoint can be written to {why}; waiting for that before it joins{since}")

    while places := await _saved_at(unary, job, taken_up=taken_up):
        why = f"{places[0]}: {SILENT}"
        with contextlib.suppress(TimeoutError):  # a dead mount never answers
            async with asyncio.timeout(min(ANSWER_S, limit_s)):
                why = await _refused(places, refuses)
        if not why:
            break
        if (left_s := began_s + limit_s - clock()) <= 0:
            say(f"no checkpoint can be written to {why}; it joins anyway, after {limit_s:g} s")
            return
        tell(why)
        await asyncio.sleep(min(delay_s, left_s))
        delay_s = min(2 * delay_s, MOST_S)
    if reported:
        over(f"waited {age(1000 * (clock() - began_s))} for the storage ({reported}), and joins now")


async def _refused(places: Sequence[str], refuses: Refusal) -> str:
    """If all `places` refuse writes, return their names and reasons; "" as soon as a place accepts a write."""
    looks = [asyncio.ensure_future(refuses(place)) for place in places]
    try:
        for look in asyncio.as_completed(looks):
            if not await look:
                return ""
        return "; ".join(f"{place}: {look.result()}" for place, look in zip(places, looks, strict=True))
    finally:
        for look in looks:
            look.cancel()


async def _saved_at(unary: UnaryClient, job: str, *, taken_up: bool) -> list[str]:
    """Return the URIs of the job's checkpoint folders; none if there is nothing to wait for or no coordinator
    answers.
    """
    try:
        phase = (await unary.call(GetJobRequest(job=job), timeout_s=ASK_S, attempt_s=ATTEMPT_S)).job.phase
        if phase in {JOB_PHASE_DONE, JOB_PHASE_FAILED} and not taken_up:
            return []
        found = await unary.call(
            GetCheckpointRequest(job=job, latest=True), timeout_s=ASK_S, attempt_s=ATTEMPT_S
        )
    except StrataError:
        return []
    saved: Checkpoint = found.checkpoint
    if saved.origin_job:  # the bytes are in another job's folder, into which this job does not write
        return []
    copies = dict.fromkeys((saved.path, *(tier.path for tier in saved.tiers)))  # `tiers` may repeat `path`
    return [folder.rstrip("/").rpartition("/")[0] for folder in copies if folder]
