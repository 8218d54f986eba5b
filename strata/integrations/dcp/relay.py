"""Forwards a background process's requests over a pipe to the trainer's session, for DCP's process mode.

DCP's process mode pickles the writer and unpickles it in another process. The session cannot move to that process,
since a rank has only one session, and a second session would replace the first. So the pickled writer carries one end
of a pipe, and the trainer's process sends the writer's requests. Limit: such a pickle can be unpickled only
once; DCP unpickles it once.
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
    """The part of a session that can be pickled: its rank's identity, and the pipe for requests to its process."""

    known: Mapping[str, Any]
    pipe: Any


def lend(port: SessionPort) -> Loan:
    """Serve requests of the process that takes the loan until it closes the pipe; return the loan.

    `ConfigError` if the loan is pickled as an argument of a new process.
    """
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


def _serve(port: SessionPort, requests: Connection[Any, Any]) -> None:
    with requests, contextlib.suppress(EOFError, OSError):  # the other process has closed the pipe, or ended
        while True:
            request, timeout_s = requests.recv()
            try:
                answer = port.call(request, timeout_s=timeout_s)
            except StrataError as error:
                answer = error
            requests.send(answer)


class BorrowedPort:
    """A `SessionPort` that forwards requests to the process that lends its session. It receives no pushed updates."""

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
        """Take the identity and the pipe of this loan from now on."""
        with self._lock:  # a response comes on the pipe of its request
            vars(self).update(loan.known)
            self._pipe: Connection[Any, Any] = Connection(loan.pipe.detach())

    def call(self, request: Message, *, timeout_s: float = 30.0) -> Any:
        with self._lock:
            try:
                self._pipe.send((request, timeout_s))
                answer = self._pipe.recv()
            except BaseException as error:
                self._pipe.close()  # an unread response would be taken for the response to the next request
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
        """Raise `Refused`: a rank arrives at a barrier once, and only the trainer's process does that."""
        raise Refused(f"the process that saves in the background cannot wait at {name!r} for its rank")

    def hold_saves(self, hold: SaveHold | None) -> None:
        """Do nothing: the trainer's process reports the holds of its own saves, and no others."""

    def observe_checkpoints(self, callback: Callable[[Checkpoint], None]) -> Callable[[], None]:
        return lambda: None
