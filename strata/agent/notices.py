"""What a notice means to one member, and the request for one."""

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
"""How much later than its grace the last rank may end: it has to leave after its save."""
LEAVE_S: Final = 5.0
"""How long the ranks of a member that leaves have to end by themselves once their generation is over: their step is saved."""
SAY_S: Final = 1.0
"""How long ranks that have not said that they heed notices are given to say so."""
ASK_SHARE: Final = 0.5
"""Of the grace: so long coordinators have to take note of a request to stop."""


class Upstream(Protocol):
    """What is needed of the session with the coordinators."""

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        """Return the response to one of the requests that a session carries."""
        ...


def asked_to_leave(update: WorldUpdate | None, worker_id: str) -> StopNotice | None:
    """Return the notice by which this member is to leave, now or since an earlier generation; None while it may stay.

    What else a notice asks for is the affair of ranks: those that stay wait for the next world, at which their agent ends them.
    """
    if update is None or not update.HasField("notice") or update.notice.generation != update.world.generation:
        return None
    leaves = meaning(notice_record(update.notice), worker_id) is Meaning.LEAVE
    return update.notice if leaves else None


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
    request = stop_message(job, reason, grace_s=grace_s, generation=generation, leaving=leaving)
    try:
        response: StopJobResponse = await upstream.call(request, timeout_s=timeout_s or ASK_SHARE * grace_s)
    except Unavailable:
        raise
    except StrataError as error:
        log.warning("run.nobody_asked", reason=str(error))
        return None
    return response.notice if response.HasField("notice") else None
