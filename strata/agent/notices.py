"""Stop notices in an agent: whether a notice makes this member leave, and how the agent requests a notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from strata.core.stop.notices import Meaning, meaning
from strata.errors import StrataError, Unavailable
from strata.observe import get_logger
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import StopJobResponse, StopNotice
from strata.wire.worlds import notice_record, stop_message

log = get_logger()

LATE_S: Final = 1.0
"""How long after the grace the last rank may end: a rank still has to leave after its save."""
LEAVE_S: Final = 5.0
"""How long the ranks of a leaving member may take to end by themselves after their generation is over: their step
is saved by then."""
SAY_S: Final = 1.0
"""How long a rank has to report that it supports graceful stop."""
REQUEST_SHARE: Final = 0.5
"""Share of the grace that the coordinators have to record a request to stop."""


class Upstream(Protocol):
    """The part of the session with the coordinators that a request needs."""

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        """Return the response to `request`, which must be of a kind that a session carries."""
        ...


def notice_for_member(update: WorldUpdate | None, worker_id: str) -> StopNotice | None:
    """Return the notice to the update's generation if it makes this member leave; None while the member may stay.

    A member that stays need not act on the notice: its ranks wait for the next world, and then the agent ends them.
    """
    if update is None or not update.HasField("notice") or update.notice.generation != update.world.generation:
        return None
    leaves = meaning(notice_record(update.notice), worker_id) is Meaning.LEAVE
    return update.notice if leaves else None


async def request_common_stop(
    upstream: Upstream,
    *,
    job: str,
    generation: int,
    reason: str,
    grace_s: float,
    leaving: Sequence[str] = (),
    timeout_s: float | None = None,
) -> StopNotice | None:
    """Request a common stop of all ranks of the generation; return the notice in force, or None.

    `leaving`: the members that leave at that stop, while the others continue; empty means all leave. The coordinators
    merge the request with an earlier notice. `Unavailable` if no coordinator answers within `timeout_s`; by default
    that is a share of the grace.
    """
    request = stop_message(job, reason, grace_s=grace_s, generation=generation, leaving=leaving)
    try:
        response: StopJobResponse = await upstream.call(
            request, timeout_s=timeout_s or REQUEST_SHARE * grace_s
        )
    except Unavailable:
        raise
    except StrataError as error:
        log.warning("run.no_stop_requested", reason=str(error))
        return None
    return response.notice if response.HasField("notice") else None
