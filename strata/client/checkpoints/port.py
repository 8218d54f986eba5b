"""`SessionPort`: the part of the client that a `CheckpointManager` needs.

The result of `strata.connect()` is a `SessionPort`. `CheckpointManager(path, client=…)` uses no other member of
`client`. All members may be used from any thread; `call` blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from strata.core.stop.save_hold import SaveHold
from strata.errors import ConfigError
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.worlds_pb2 import RestorePoint


class SessionPort(Protocol):
    """One rank of one generation, and its session."""

    @property
    def uid(self) -> str:
        """The cluster's uid, from the session's token."""
        ...

    @property
    def job(self) -> str: ...

    @property
    def worker_id(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def restore_point(self) -> RestorePoint | None:
        """The checkpoint that this rank's generation starts from; None if it starts without a checkpoint."""
        ...

    def call(self, request: Message, *, timeout_s: float = ...) -> Any:
        """Return the response to one of the requests that `Call` carries.

        Raise the `StrataError` of the reply, or `Unavailable` if no reply came in time.
        """
        ...

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        """Return once every rank of the world has arrived; `BarrierTimeout` names the missing ranks."""
        ...

    def hold_saves(self, hold: SaveHold | None) -> None:
        """Report that this rank trains on but cannot save for now, or (None) that it can save again; never raise."""
        ...

    def observe_checkpoints(self, callback: Callable[[Checkpoint], None]) -> Callable[[], None]:
        """Call `callback` with every `Down.checkpoint`, in the session's thread; return a function that removes
        `callback`.
        """
        ...


PORT_MEMBERS: Final = tuple(sorted(name for name in vars(SessionPort) if not name.startswith("_")))
"""The members that an object must have to be a `SessionPort`."""


def check_port(client: SessionPort) -> None:
    """Raise `ConfigError` unless `client` is a session that knows its cluster."""
    missing = [name for name in PORT_MEMBERS if not hasattr(client, name)]
    if missing:
        raise ConfigError(
            f"client is a {type(client).__name__}, which has no {missing[0]!r}",
            hint="pass the client of strata.connect()",
        )
    if not client.uid:
        raise ConfigError("the session does not know its cluster yet", hint="connect it first")
