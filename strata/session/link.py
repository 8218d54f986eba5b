"""`Link`: one end of a two-way stream of messages, whatever the transport.

The real transport is a gRPC stream (`strata.wire.streams`); the simulation's is two queues in memory. All
session, coordinator and client logic is written against this protocol, so that the simulation runs it unchanged
in virtual time.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeVar

from strata.errors import StrataError

In_co = TypeVar("In_co", covariant=True)
Out_contra = TypeVar("Out_contra", contravariant=True)

MAX_MESSAGE_BYTES: Final = 4 << 20
"""A larger message ends the stream on which it is sent, together with everything else on that stream. Code that
forwards other programs' content must check the size first: after a reconnect the same message would end the
stream again."""


class Link(Protocol[In_co, Out_contra]):
    """One end of a stream: receives `In` and sends `Out`, each in order. One reader only."""

    async def recv(self) -> In_co | None:
        """Return the next message; None once either side ended the stream.

        At the side that dialled, a stream that ends with an error raises that error. A broken transport raises
        `Unavailable`, or `TransportBroken` if it was ended or reset. The side that accepted cannot distinguish a
        broken transport from a clean end, and gets None for both.
        """
        ...

    def send(self, message: Out_contra) -> None:
        """Queue one message; never wait.

        If the other side reads so slowly that the bounded queue is full, the link ends with `Unavailable`;
        after its reconnect the other side receives the whole state again. After the end, sending does nothing;
        `recv` reports the end.
        """
        ...

    def close(self, error: StrataError | None = None) -> None:
        """End the stream, with `error` if there is one, once everything sent has gone out.

        Never wait. Messages that a silent other side does not take within a second are dropped. Only the first
        call counts.
        """
        ...

    def check(self) -> None:
        """Raise `QuotaExceeded` if the other side must read earlier answers before it may send more requests."""
        ...

    @property
    def closed(self) -> bool:
        """Whether this side has ended the stream, or is ending it."""
        ...

    @property
    def backlog(self) -> int:
        """How many sent messages the transport has not taken yet."""
        ...
