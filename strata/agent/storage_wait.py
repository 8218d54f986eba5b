"""A member that begins waits until its job's checkpoints can be written, before it registers.

A job whose storage is full, or does not answer, would train in vain: it holds its saves, stops when its
grace is over, is started again, and so on. So a member looks first:

    1. It asks a coordinator for the job and its newest checkpoint. Without one, or of a job that has ended
       and is not taken up, it does not wait. Nor does it when no coordinator answers within `ASK_S`.
    2. It writes a small object beside each copy of that checkpoint, and removes it. If that works anywhere, or
       fails for a reason that only somebody can mend, it does not wait.
    3. Else it says why, tries again after 1 s, 2 s … 30 s, and from 1 on each time: others may end the job.
    4. After `limit_s` it registers all the same: it knows where the job saved, not where it is going to.

It is no member meanwhile, so nobody waits for it, and no generation begins with it.
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
"""How long the coordinators have to answer, and each of them; a member that finds none registers as ever."""
FIRST_S: Final = 1.0
MOST_S: Final = 30.0
ANSWER_S: Final = 60.0
"""How long a storage has to answer one try, which is longer than a client of S3 tries by itself. A mount that hangs
keeps the thread of each try, some ten of them in a grace of 15 minutes, until it answers or the process ends."""
SAY_S: Final = 300.0
"""How often it is said again for what is waited."""

Say = Callable[[str], None]
Refusal = Callable[[str], Awaitable[str]]
"""Returns why nothing can be written at a folder's URI that time may heal; "" for anything else."""


async def in_thread(uri: str) -> str:
    """Return `refusal` of a storage that may never answer: its thread keeps no process from ending."""
    told: concurrent.futures.Future[str] = concurrent.futures.Future()
    told.set_running_or_notify_cancel()  # whoever stops waiting does not take it from the thread

    def probe() -> None:
        from strata.checkpoint.storage.opening import refusal  # noqa: PLC0415  # most members that begin need none of it

        try:
            told.set_result(refusal(uri, nonce=lambda: uuid.uuid4().hex))
        except Exception as error:  # noqa: BLE001  # it is the waiter's, who gets it
            told.set_exception(error)

    threading.Thread(target=probe, name="strata-storage-probe", daemon=True).start()
    return await asyncio.wrap_future(told)


def grace_s(environment: Mapping[str, str]) -> float:
    """Return for how long a member waits: as long as its ranks hold a save."""
    try:
        return TrainingConfig.load(env=environment).save_grace_s
    except ConfigError:  # the ranks say that better, if they train by it
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
    """Return once this job's checkpoints can be written, there is nothing to wait for, or after `limit_s`.

    `taken_up`: a job that has ended goes on with this member. `say` is told for what it waits, when that
    begins, when it becomes another reason, every five minutes, and when it waits no longer; `over` once, when
    the storage was worth the wait.
    """
    if limit_s <= 0:
        return
    clock = asyncio.get_running_loop().time
    began_s, delay_s, told, told_s = clock(), FIRST_S, "", 0.0

    def tell(why: str) -> None:
        nonlocal told, told_s
        if why != told or clock() - told_s >= SAY_S:
            told, told_s = why, clock()
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
            say(f"no checkpoint can be written to {why}; it joins all the same, after {limit_s:g} s")
            return
        tell(why)
        await asyncio.sleep(min(delay_s, left_s))
        delay_s = min(2 * delay_s, MOST_S)
    if told:
        over(f"waited {age(1000 * (clock() - began_s))} for the storage ({told}), and joins now")


async def _refused(places: Sequence[str], refuses: Refusal) -> str:
    """Return which of `places` refuses, and why, if all do; "" as soon as one takes what is written."""
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
    """Return the URIs of the job's folders of checkpoints; none to wait for, or where nobody answers."""
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
    if saved.origin_job:  # its bytes are those of another job, which this one does not write
        return []
    copies = dict.fromkeys((saved.path, *(tier.path for tier in saved.tiers)))  # which name that at path, too
    return [folder.rstrip("/").rpartition("/")[0] for folder in copies if folder]
