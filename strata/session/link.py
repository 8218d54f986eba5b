"""One end of a two-way stream of messages, whatever carries it.

The real one is a gRPC stream (`strata.wire.streams`), the other one two queues in memory. All
session, coordinator and client logic is written against this protocol, so that a simulation runs
it unchanged in virtual time.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeVar

from strata.errors import StrataError

In_co = TypeVar("In_co", covariant=True)
Out_contra = TypeVar("Out_contra", contravariant=True)

MAX_MESSAGE_BYTES: Final = 4 << 20
"""A larger message ends the stream that it is sent on, and everything else that rides on it. Who
sends what somebody else made looks first: sent again after a reconnect, it would end that as well.
"""


class Link(Protocol[In_co, Out_contra]):
    """One end of a stream: receives `In` and sends `Out`, each in order. One reader only."""

    async def recv(self) -> In_co | None:
        """Return the next message; None once the other side ended the stream, or this one did.

        At the end that dialled, a broken transport or an end with an error raises that error
        (`Unavailable` for the transport, `TransportBroken` when it was ended or reset). The end that accepted cannot tell a broken transport
        from a clean end, and gets None for both.
        """
        ...

    def send(self, message: Out_contra) -> None:
        """Queue one message; never wait.

        When the other side reads so slowly that the bounded queue is full, the link ends with
        `Unavailable`: whoever reconnects is told the whole state anew. After the end, sending
        does nothing; the reader learns of the end.
        """
        ...

    def close(self, error: StrataError | None = None) -> None:
        """End the stream, with `error` if there is one, once what was sent has gone out.

        Waits for nothing. What a silent other side does not take within a second is dropped.
        Only the first call counts.
        """
        ...

    def check(self) -> None:
        """Return if the other side may be answered; `QuotaExceeded` if it has to read before it asks for more."""
        ...

    @property
    def closed(self) -> bool:
        """Whether this side has ended the stream, or is ending it."""
        ...

    @property
    def backlog(self) -> int:
        """How many sent messages the transport has not taken yet."""
        ...
