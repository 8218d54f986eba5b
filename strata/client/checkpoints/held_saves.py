"""A rank's report that it cannot save: sent with each progress report, and recorded by the coordinators once."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from strata.core.stop.save_hold import MAX_HOST_CHARS, MAX_REASON_CHARS, SaveHold
from strata.errors import StrataError
from strata.session.client_session import Session
from strata.v1.checkpoints_pb2 import HoldSavesRequest
from strata.v1.common_pb2 import Author
from strata.v1.members_pb2 import SaveHold as SaveHoldMessage

log: Final = logging.getLogger("strata.client")


class HeldSaves:
    """One save hold: the time for which storage refuses one rank's saves, from the first refusal on. Must be
    created in the event loop's thread.
    """

    def __init__(self, session: Session, job: str, author: Author, hold: SaveHold) -> None:
        """Begin to record the hold; the request is repeated, at any replica, until a replica has recorded the hold."""
        self._hold = hold
        self._since_s = asyncio.get_running_loop().time() - max(0.0, hold.held_s)
        request = HoldSavesRequest(
            job=job,
            author=author,
            step=hold.step,
            reason=hold.reason[:MAX_REASON_CHARS],
            host=hold.host[:MAX_HOST_CHARS],
        )
        self.recording = asyncio.get_running_loop().create_task(_record(session, request), name="held saves")

    def message(self) -> SaveHoldMessage:
        """Return the hold for the rank's progress report, with its duration until now."""
        held_s = asyncio.get_running_loop().time() - self._since_s
        return SaveHoldMessage(
            step=self._hold.step,
            held_ms=round(1000 * held_s),
            reason=self._hold.reason[:MAX_REASON_CHARS],
            host=self._hold.host[:MAX_HOST_CHARS],
        )


async def _record(session: Session, request: HoldSavesRequest) -> None:
    """Record the hold. The only effect of a failure: the generation may count as a generation without progress."""
    try:
        await session.call(request, timeout_s=None)
    except StrataError as error:
        log.debug("held saves are not recorded: %s", error)
