"""What a `CheckpointManager` needs of the client: `SessionPort`.

The facade that `strata.connect()` returns is one. `CheckpointManager(path, client=facade)` takes
nothing else of it. All members may be used from any thread; `call` blocks.
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
        """The cluster's uid, as the session's token names it."""
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
        """Where this rank's generation begins; None when it begins from nothing."""
        ...

    def call(self, request: Message, *, timeout_s: float = ...) -> Any:
        """Return the response to one of the requests that `Call` carries.

        Raises the `StrataError` of the answer; `Unavailable` when there was none in time.
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
        """Return once every rank of the world is here; `BarrierTimeout` names who was missing."""
        ...

    def hold_saves(self, hold: SaveHold | None) -> None:
        """Say that this rank trains on and cannot save for now, or (None) that it can again; never raises."""
        ...

    def observe_checkpoints(self, callback: Callable[[Checkpoint], None]) -> Callable[[], None]:
        """Hand every `Down.checkpoint` to `callback`, in the session's thread; return the way out."""
        ...


PORT_MEMBERS: Final = tuple(sorted(name for name in vars(SessionPort) if not name.startswith("_")))
"""What an object must have to be one."""


def check_port(client: SessionPort) -> None:
    """Return if `client` is a session that knows its cluster; else `ConfigError`."""
    missing = [name for name in PORT_MEMBERS if not hasattr(client, name)]
    if missing:
        raise ConfigError(
            f"client is a {type(client).__name__}, which has no {missing[0]!r}",
            hint="pass what strata.connect() returned",
        )
    if not client.uid:
        raise ConfigError("the session does not know its cluster yet", hint="connect it first")
