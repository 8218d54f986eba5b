"""A restore that keeps what it reads: a leased key says so until it is done (PROTOCOLS 8.5)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from google.protobuf.message import Message

from strata.errors import StrataError
from strata.v1.checkpoints_pb2 import CloseCheckpointRequest, OpenCheckpointRequest

TTL_S: Final = 60
"""How long a reader that died keeps what it was reading."""
JOIN_S: Final = 5.0

log: Final = logging.getLogger("strata.checkpoint")


@contextlib.contextmanager
def reading(
    ask: Callable[[Message], Any], *, job: str, step: int, attempt: str, reader: str, who: str
) -> Iterator[None]:
    """Keep a checkpoint's bytes while the body runs; `Refused` when they are to be deleted already.

    Registered anew three times in each lease. Where no coordinator answers any more the body goes on:
    then nobody marks anything for deletion either, and what was marked before was refused.
    """
    request = OpenCheckpointRequest(job=job, step=step, attempt=attempt, reader=reader, who=who, ttl_s=TTL_S)
    ask(request)
    done = threading.Event()

    def renew() -> None:
        while not done.wait(TTL_S / 3):
            try:
                ask(request)
            except StrataError as error:
                log.warning("step %d is read without a lease for now: %s", step, error.message)

    renewing = threading.Thread(target=renew, name="strata-reader", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        done.set()
        renewing.join(JOIN_S)
        with contextlib.suppress(StrataError):  # the lease runs out by itself
            ask(CloseCheckpointRequest(job=job, step=step, attempt=attempt, reader=reader))
