"""What a notice means to one member, and the request for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from strata.errors import StrataError, Unavailable
from strata.observe import get_logger
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import (
    STOP_ACTION_DRAIN,
    STOP_ACTION_PREEMPT,
    STOP_ACTION_RESHAPE,
    StopJobRequest,
    StopJobResponse,
    StopNotice,
)

log = get_logger()

LATE_S: Final = 1.0
"""How much later than its grace the last rank may end: it has to leave after its save."""
SAY_S: Final = 1.0
"""How long ranks that have not said that they heed notices are given to say so."""
ASK_SHARE: Final = 0.5
"""Of the grace: so long coordinators have to take note of a request to stop."""


class Upstream(Protocol):
    """What is needed of the session with the coordinators."""

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        """Return the response to one of the requests that a session carries."""
        ...


def notice_for(update: WorldUpdate, worker_id: str) -> StopNotice | None:
    """Return the notice of `update` if this member is to do something about it, else None.

    Who has no place is told only of what asked it to leave, now or in an earlier generation.
    """
    if not update.HasField("notice") or update.notice.generation != update.world.generation:
        return None
    return update.notice if names(update.notice, worker_id) else None


def names(notice: StopNotice, worker_id: str) -> bool:
    """Tell whether a notice asks something of this member, and not of others, or of its ranks, only."""
    if notice.action == STOP_ACTION_RESHAPE:
        return False
    return notice.action != STOP_ACTION_DRAIN or worker_id in notice.worker_ids


def leaves(notice: StopNotice) -> bool:
    """Tell whether a member that obeys this notice ends, or waits for the job to go on."""
    return notice.action in {STOP_ACTION_PREEMPT, STOP_ACTION_DRAIN}


async def ask_all_to_stop(
    upstream: Upstream,
    *,
    job: str,
    generation: int,
    reason: str,
    grace_s: float,
    leaving: Sequence[str] = (),
    timeout_s: float | None = None,
) -> StopNotice | None:
    """Have all ranks of the generation asked to stop; return the notice that holds, None if none can.

    `leaving`: the members that then leave, the others going on; none means all. An earlier notice
    is merged with this one. `Unavailable` when nobody answered within a share of the grace, or `timeout_s`.
    """
    request = StopJobRequest(
        job=job,
        action=STOP_ACTION_DRAIN if leaving else STOP_ACTION_PREEMPT,
        worker_ids=leaving,
        reason=reason,
        generation=generation,
        grace_ms=round(1000 * grace_s),
    )
    try:
        response: StopJobResponse = await upstream.call(request, timeout_s=timeout_s or ASK_SHARE * grace_s)
    except Unavailable:
        raise
    except StrataError as error:
        log.warning("run.nobody_asked", reason=str(error))
        return None
    return response.notice if response.HasField("notice") else None
