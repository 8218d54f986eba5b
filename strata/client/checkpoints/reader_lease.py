"""Reader lease: a leased key protects a checkpoint from deletion while a restore reads it (PROTOCOLS 8.5)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import Message

from strata.errors import StrataError, Unavailable
from strata.v1.checkpoints_pb2 import CloseCheckpointRequest, OpenCheckpointRequest

TTL_S: Final = 60
"""Seconds for which a checkpoint stays protected after the process that was reading it has died."""
RENEW_S: Final = TTL_S / 3
JOIN_S: Final = 5.0

log: Final = logging.getLogger("strata.checkpoint")


class ReaderLease:
    """Protects a checkpoint's bytes until `close`, by a thread that renews the lease; `Refused` if the bytes are
    being deleted.

    If no coordinator answers, the read goes on. In an outage of all coordinators no checkpoint is marked for
    deletion. Limit: if only this host is cut off, the bytes that it reads may be deleted.
    """

    def __init__(
        self,
        ask: Callable[[Message], Any],
        *,
        job: str,
        step: int,
        attempt: str,
        reader: str,
        who: str,
    ) -> None:
        self._ask = ask
        self._open = OpenCheckpointRequest(
            job=job, step=step, attempt=attempt, reader=reader, who=who, ttl_s=TTL_S
        )
        self._close = CloseCheckpointRequest(job=job, step=step, attempt=attempt, reader=reader)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strata-reader", daemon=True)
        try:
            ask(self._open)
        except Unavailable as error:
            self._warn(error)
        self._thread.start()

    def stop(self) -> None:
        """Let the thread delete the key; do not wait."""
        self._done.set()

    def close(self) -> None:
        """Delete the key; if that takes too long, the lease expires by itself."""
        self.stop()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._done.wait(RENEW_S):
            try:
                self._ask(self._open)
            except StrataError as error:
                self._warn(error)
        with contextlib.suppress(StrataError):  # the lease expires by itself
            self._ask(self._close)

    def _warn(self, error: StrataError) -> None:
        log.warning("step %d is read without a lease for now: %s", self._open.step, error.message)
