"""A suspended replica: its etcd was replaced, so it serves nobody, and reports why and the way back (PROTOCOLS 9.1).

It keeps its ports, so that probes, pages and callers receive the reason instead of a refused connection.
Callers receive `Unavailable`: members keep their ranks running, and retry. Every second the replica reads etcd
again. Once the cluster has been restored, the process serves the restored cluster with a new instance, without
operator action. It never serves the same uid again, because nothing shows which writes etcd has lost. Limit: if
an endpoint only pointed at another etcd for a while, an operator must restart the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc.aio

from strata.config import CoordinatorConfig
from strata.coordinator.context import Serving
from strata.coordinator.etcd.access import connect_once
from strata.coordinator.rpc.server import bind, server_options
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import ClusterUid, PoisonRecord, decode
from strata.core.kv.txn import Range
from strata.core.restore.lineage import THE_WAY_BACK, WENT_BACK, replacement
from strata.core.restore.records import Restoring
from strata.core.timing import Timing
from strata.errors import ClusterReplaced, StrataError, Unavailable
from strata.observe import get_logger
from strata.wire import status

log = get_logger()

POLL_S: Final = 1.0
"""Interval between two reads of etcd."""
ANSWER_S: Final = 5.0
"""Timeout of one read of etcd."""
FIRST_MESSAGE_S: Final = 1.0
"""How long a refused caller may take to send its first message."""
REMIND_S: Final = 60.0
"""Interval between two reminders in the log."""
STOP_GRACE_S: Final = 0.5
MOST_CONNECTIONS: Final = 4096

SuspendedPage = Callable[[Callable[[], str]], Serving]
"""Makes the HTTP server of the probes for a suspended replica, given a function that returns the reason."""


class Suspended:
    """One suspension of a replica that served the cluster `uid` up to `revision`; `run` is its life."""

    def __init__(
        self,
        config: CoordinatorConfig,
        cause: ClusterReplaced,
        *,
        uid: str,
        revision: int,
        since: str,
        page: SuspendedPage | None = None,
    ) -> None:
        """`since`: the time, as text for people, at which this replica detected the replacement."""
        self._config = config
        self._keys = ClusterKeys(config.cluster)
        self._uid = uid
        self._revision = revision
        self._since = since
        self._cause = cause.message
        self._found = ""
        self._restoring = ""
        self._page = page
        self._stopping = asyncio.Event()

    @property
    def reason(self) -> str:
        """Why nobody is served, in one sentence."""
        what = self._restoring or self._cause
        return f"{WENT_BACK} at {self._since}: {what}"

    def is_ready(self) -> tuple[bool, str]:
        """Return False, with the reason and the way back: members may not be sent to this replica."""
        return False, f"{self.reason}; the way back: {THE_WAY_BACK}"

    def stop(self) -> None:
        """Make `run` return ""."""
        self._stopping.set()

    async def run(self) -> str:
        """Refuse every caller; return the cluster's uid once the cluster can be served, or "" when stopped."""
        log.error("replica_suspended", reason=self.reason, hint=THE_WAY_BACK)
        async with self._refusing(), self._shown():
            reminded = asyncio.get_running_loop().time()
            while True:
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._stopping.wait()
                        return ""
                except TimeoutError:
                    pass
                if not await self._is_replaced():
                    log.info("replica_resumes", uid=self._found, before=self._uid)
                    return self._found
                now = asyncio.get_running_loop().time()
                if now - reminded >= REMIND_S:
                    reminded = now
                    log.error("replica_suspended", reason=self.reason, hint=THE_WAY_BACK)

    async def _is_replaced(self) -> bool:
        """Read etcd again; return False once etcd has the cluster that this replica may serve."""
        try:
            async with asyncio.timeout(ANSWER_S), await connect_once(self._config.etcd) as store:
                # read the uid last: if it is found, no restore began between the two reads
                restoring = await store.read(Range(key=self._keys.restoring))
                answer = await store.read(Range(key=self._keys.uid))
        except (StrataError, TimeoutError):
            return True  # nothing new is known: the earlier reason stays
        try:
            found = decode(ClusterUid, answer.kvs[0].value) if answer.kvs else None
            restore = str(decode(Restoring, restoring.kvs[0].value)) if restoring.kvs else ""
        except PoisonRecord as error:
            self._cause = error.message
            return True
        why = replacement(
            uid=self._uid,
            revision=self._revision,
            found=found,
            at_revision=answer.revision,
            restoring=restore,
        )
        # the first reason stays: a reason with a changing revision would give every caller a new text each
        # second
        self._restoring = why if restore else ""
        self._found = found.uid if found is not None else ""
        return bool(why)

    @asynccontextmanager
    async def _refusing(self) -> AsyncIterator[None]:
        """Answer each call at the replica's port with the reason."""
        timing = Timing.derive(self._config.detect_s)
        server = grpc.aio.server(options=server_options(timing, most_connections=MOST_CONNECTIONS))
        server.add_generic_rpc_handlers((Refusal(self._error),))
        bind(server, self._config)
        await server.start()
        try:
            yield
        finally:
            await server.stop(STOP_GRACE_S)

    @asynccontextmanager
    async def _shown(self) -> AsyncIterator[None]:
        """Answer the probes, and every page, with the reason."""
        if self._page is None:
            yield
            return
        page = self._page(lambda: self.is_ready()[1])
        await page.start()
        running = asyncio.create_task(page.run(), name="page")
        try:
            yield
        finally:
            await page.stop()
            running.cancel()
            await asyncio.wait([running])

    def _error(self) -> StrataError:
        return Unavailable(self.reason, hint=f"the way back: {THE_WAY_BACK}")


class Refusal(grpc.GenericRpcHandler):
    """Answers every method with an error."""

    def __init__(self, error: Callable[[], StrataError]) -> None:
        self._error = error

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        async def refuse(_requests: Any, context: Any) -> None:
            # If a call ends before a grpc.aio client has written its first message, the client may lose the reason
            # and report "Internal error from Core" (grpc/grpc#36066). So the replica reads that message first; a
            # caller that sends none gets the reason after the timeout.
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_MESSAGE_S):
                    await context.read()
            await status.abort(context, self._error())

        # a stream-stream handler can serve a unary call too, since this handler sends no message
        return grpc.stream_stream_rpc_method_handler(refuse)  # type: ignore[no-any-return,arg-type,unused-ignore]
