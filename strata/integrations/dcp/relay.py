"""A trainer's session, lent to the process in which DCP saves in the background.

DCP's process mode pickles the writer and unpickles it in a process of its own. A session cannot go
along: a rank has one, and a second would take its place. So the writer takes the address of a Unix
socket along, and what it asks is asked for it by the trainer's process.

Of the protocol: a request is the seconds it may take and a message in an `Any`; an answer begins
with + and is a message, or with - and is a `strata.v1.Error`.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError, connection
from typing import Any, Final

from google.protobuf import any_pb2, symbol_database
from google.protobuf.message import Message

from strata.client.checkpoint_port import SessionPort
from strata.core.save_hold import SaveHold
from strata.errors import Refused, StrataError, Unavailable
from strata.v1 import common_pb2
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.worlds_pb2 import RestorePoint
from strata.wire.errors import pack, unpack

_SECONDS: Final = struct.Struct("!d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """How the trainer's process is reached, and which rank it is: all of it can be pickled."""

    socket: str
    key: bytes
    uid: str
    job: str
    worker_id: str
    incarnation: int
    generation: int
    rank: int
    world_size: int
    restore_point: bytes | None


class Lender:
    """Asks for others of this host what they may not ask themselves; ends with its process."""

    def __init__(self, port: SessionPort) -> None:
        self._port = port
        self._key = os.urandom(32)
        self._listener = connection.Listener(family="AF_UNIX", authkey=self._key)
        threading.Thread(target=self._accept, name="strata-dcp-lender", daemon=True).start()

    @property
    def address(self) -> Address:
        """Where, and as whom, another process asks."""
        port, point = self._port, self._port.restore_point
        return Address(
            socket=str(self._listener.address),
            key=self._key,
            uid=port.uid,
            job=port.job,
            worker_id=port.worker_id,
            incarnation=port.incarnation,
            generation=port.generation,
            rank=port.rank,
            world_size=port.world_size,
            restore_point=point.SerializeToString() if point is not None else None,
        )

    def close(self) -> None:
        """Lend no longer."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                asking = self._listener.accept()
            except AuthenticationError:
                continue
            except (OSError, EOFError):  # closed
                return
            threading.Thread(target=self._serve, args=(asking,), daemon=True).start()

    def _serve(self, asking: connection.Connection) -> None:
        with asking, contextlib.suppress(EOFError, OSError):  # the other process has ended
            while True:
                data = asking.recv_bytes()
                (timeout_s,) = _SECONDS.unpack_from(data)
                try:
                    answer = self._port.call(_message(data[_SECONDS.size :]), timeout_s=timeout_s)
                except StrataError as error:
                    asking.send_bytes(b"-" + pack(error).SerializeToString())
                else:
                    asking.send_bytes(b"+" + _wrapped(answer))


class BorrowedPort:
    """A `SessionPort` by way of the process that lends one. Nothing is pushed to it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._connection: connection.Connection | None = None

    @property
    def uid(self) -> str:
        return self._address.uid

    @property
    def job(self) -> str:
        return self._address.job

    @property
    def worker_id(self) -> str:
        return self._address.worker_id

    @property
    def incarnation(self) -> int:
        return self._address.incarnation

    @property
    def generation(self) -> int:
        return self._address.generation

    @property
    def rank(self) -> int:
        return self._address.rank

    @property
    def world_size(self) -> int:
        return self._address.world_size

    @property
    def restore_point(self) -> RestorePoint | None:
        data = self._address.restore_point
        return RestorePoint.FromString(data) if data is not None else None

    def call(self, request: Message, *, timeout_s: float = 30.0) -> Any:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = connection.Client(
                        self._address.socket, family="AF_UNIX", authkey=self._address.key
                    )
                self._connection.send_bytes(_SECONDS.pack(timeout_s) + _wrapped(request))
                answer = self._connection.recv_bytes()
            except (OSError, EOFError, AuthenticationError) as error:
                self._connection = None
                raise Unavailable(
                    f"the trainer's process, which asks the coordinators, is not there: {error}", hint=""
                ) from error
        if answer[:1] == b"-":
            raise unpack(common_pb2.Error.FromString(answer[1:]))
        return _message(answer[1:])

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


def _wrapped(message: Message) -> bytes:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed.SerializeToString()


def _message(data: bytes) -> Message:
    packed = any_pb2.Any.FromString(data)
    symbols = symbol_database.Default()
    message: Message = symbols.GetSymbol(packed.TypeName())()
    packed.Unpack(message)
    return message
