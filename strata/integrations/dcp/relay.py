"""A trainer's session, lent over a pipe to the process in which DCP saves in the background.

DCP's process mode pickles the writer and unpickles it in a process of its own. A session cannot go
along: a rank has one, and a second would take its place. So the writer takes one end of a pipe along, and what
it asks is asked for it by the trainer's process. A pickle is unpickled once, as DCP does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, context, reduction
from multiprocessing.connection import Connection
from typing import Any, Final

from google.protobuf.message import Message

from strata.client.checkpoints.port import SessionPort
from strata.core.stop.save_hold import SaveHold
from strata.errors import ConfigError, Refused, StaleIncarnation, StrataError
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.worlds_pb2 import RestorePoint

_KNOWN: Final = (
    "uid",
    "job",
    "worker_id",
    "incarnation",
    "generation",
    "rank",
    "world_size",
    "restore_point",
)


@dataclass(frozen=True, slots=True)
class Loan:
    """What of a session can be pickled: who its rank is, and the pipe on which its process asks for others."""

    known: Mapping[str, Any]
    pipe: Any


def lend(port: SessionPort) -> Loan:
    """Ask for whoever takes the loan, from now on until it lets go; `ConfigError` for a process that begins with it."""
    if context.get_spawning_popen() is not None:
        raise ConfigError(
            "a StrataWriter with a session cannot be an argument of a new process",
            hint="send it by a pipe or a queue once that process runs, as DCP does",
        )
    here, there = Pipe()
    with there:
        loan = Loan({name: getattr(port, name) for name in _KNOWN}, reduction.DupFd(there.fileno()))
    threading.Thread(target=_serve, args=(port, here), name="strata-dcp-lender", daemon=True).start()
    return loan


def _serve(port: SessionPort, asking: Connection[Any, Any]) -> None:
    with asking, contextlib.suppress(EOFError, OSError):  # the other process has let go, or ended
        while True:
            request, timeout_s = asking.recv()
            try:
                answer = port.call(request, timeout_s=timeout_s)
            except StrataError as error:
                answer = error
            asking.send(answer)


class BorrowedPort:
    """A `SessionPort` by way of the process that lends one. Nothing is pushed to it."""

    uid: str
    job: str
    worker_id: str
    incarnation: int
    generation: int
    rank: int
    world_size: int
    restore_point: RestorePoint | None

    def __init__(self, loan: Loan) -> None:
        self._lock = threading.Lock()
        self.take(loan)

    def take(self, loan: Loan) -> None:
        """Be the rank of this loan from now on, and ask by its pipe."""
        with self._lock:  # a request is answered on the pipe on which it was asked
            vars(self).update(loan.known)
            self._pipe: Connection[Any, Any] = Connection(loan.pipe.detach())

    def call(self, request: Message, *, timeout_s: float = 30.0) -> Any:
        with self._lock:
            try:
                self._pipe.send((request, timeout_s))
                answer = self._pipe.recv()
            except BaseException as error:
                self._pipe.close()  # an answer that nobody took would be that to the next request
                if not isinstance(error, OSError | EOFError):
                    raise
                raise StaleIncarnation(
                    f"the trainer's process, which asks the coordinators, is not there: {error}", hint=""
                ) from error
        if isinstance(answer, StrataError):
            raise answer
        return answer

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        """Refuse: a rank arrives once, and that is for the trainer's process to do."""
        raise Refused(f"the process that saves in the background cannot wait at {name!r} for its rank")

    def hold_saves(self, hold: SaveHold | None) -> None:
        """Do nothing: the rank's word is the trainer's process's, which does not see this one's storage."""

    def observe_checkpoints(self, callback: Callable[[Checkpoint], None]) -> Callable[[], None]:
        return lambda: None
