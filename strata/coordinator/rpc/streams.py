"""The gRPC streams: sessions of members, links of peers, watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from strata.coordinator.access.admission import Admission
from strata.coordinator.rpc.unsent_answers import Ledger
from strata.coordinator.service import Service
from strata.core.access.authority import Identity
from strata.errors import StrataError
from strata.observe import get_logger
from strata.session.link import Link
from strata.v1 import watch_pb2
from strata.v1.peers_pb2 import PeerDown, PeerUp
from strata.v1.session_pb2 import Down, Up
from strata.wire.status import abort
from strata.wire.streams import Spawn, serve_stream

log = get_logger()


class Streams:
    """Serves the streams of one replica, each under the name of its method."""

    def __init__(self, service: Service, admission: Admission, ledger: Ledger, spawn: Spawn) -> None:
        self._service = service
        self._admission = admission
        self._ledger = ledger
        self._spawn = spawn

    def by_method(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "Sessions.Session": self.session,
            "Peers.Link": self.link,
            "Watch.Watch": self.watch,
        }

    async def session(self, _requests: Any, context: Any) -> None:
        """Serve a member's session; it reads and writes through its context."""
        identity = await _admitted(self._admission, context, "Sessions.Session")
        reviewed = self._admission.reviewed(context, identity, "sessions")
        account = self._ledger.account(context, identity)

        async def serve(link: Link[Up, Down]) -> None:
            with reviewed(link.close):
                await self._service.serve_member(link, identity)

        try:
            with self._admission.holding(identity, "sessions"):
                await serve_stream(context, serve, self._spawn, account=account)
        except StrataError as error:
            await abort(context, error)

    async def link(self, _requests: Any, context: Any) -> None:
        """Serve a peer's link; it reads and writes through its context."""
        identity = await _admitted(self._admission, context, "Peers.Link")
        reviewed = self._admission.reviewed(context, identity, "links")
        account = self._ledger.account(context, identity)

        async def serve(link: Link[PeerUp, PeerDown]) -> None:
            with reviewed(link.close):
                await self._service.serve_peer(link, identity)

        await serve_stream(context, serve, self._spawn, account=account)

    async def watch(
        self, request: watch_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[watch_pb2.WatchResponse]:
        """Send changes until the caller disconnects."""
        identity = await _admitted(self._admission, context, "Watch.Watch", job=request.job)
        revoked: list[StrataError] = []
        try:
            account = self._ledger.account(context, identity)
            account.check()
            reviewed = self._admission.reviewed(context, identity, "watches")
            with self._admission.holding(identity, "watches"), reviewed(revoked.append):
                async for response in self._service.watches.watch(request):
                    if revoked:  # checked with each message, so at least every few seconds
                        raise revoked[0]
                    paid = account.owe(response.ByteSize())
                    try:
                        yield response
                    finally:
                        paid()
        except StrataError as error:
            await abort(context, error)


async def _admitted(
    admission: Admission, context: Any, method: str, *, job: str | None = None
) -> Identity | None:
    """Return the caller that opens the stream; if the caller lacks permission, end the stream with the reason."""
    try:
        return admission.admit(context, method, job=job)
    except StrataError as error:
        pending_errors = admission.refusals.due(asyncio.get_running_loop().time())
        if pending_errors is not None:
            log.warning(
                "stream_refused",
                method=method,
                peer=context.peer(),
                error=error.message,
                more_before=pending_errors,
            )
        await abort(context, error)
