"""The other ranks of a training, as one of them sees them: `RankContext`.

Two implementations: `RankClient`, over its session, and `Alone`, for a process that trains without
any coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message

from strata.errors import ConfigError, Refused, StrataError
from strata.v1.members_pb2 import TrainingReport
from strata.v1.session_pb2 import RankPlace, WorldUpdate


class RankContext(Protocol):
    """One rank of one generation."""

    @property
    def job(self) -> str: ...

    @property
    def worker_id(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def is_standalone(self) -> bool:
        """Whether this is a standalone process: nobody starts it again, or says how it ended."""
        ...

    @property
    def detect_s(self) -> float:
        """Within how many seconds a frozen process is noticed; 0 where nobody looks."""
        ...

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        """Return once every rank is here, with what each brought."""
        ...

    def progress(
        self,
        step: int,
        phase: str = "",
        *,
        own_s: float | None = None,
        data_wait_s: float | None = None,
        training: Callable[[], TrainingReport] | None = None,
    ) -> None:
        """Say how far this rank is; raises once its generation or session has ended.

        `own_s` is how long its own part of the last step took, `data_wait_s` how much of that was for data,
        `training` returns how the training goes as a whole, if that is sent: in another thread.
        """
        ...

    def heed_notices(self) -> None:
        """Say, from the next progress on, that this rank stops by itself when its world is asked to."""
        ...

    def observe_world(self, callback: Callable[[WorldUpdate], None]) -> Callable[[], None]:
        """Hand every update of the world to `callback`, in a background thread; return the way out."""
        ...

    def observe_place(self, callback: Callable[[RankPlace], None]) -> Callable[[], None]:
        """Hand a place in a newer generation to `callback`, in a background thread; return the way out."""
        ...

    def observe_end(self, callback: Callable[[StrataError], None]) -> Callable[[], None]:
        """Hand the error that ends this rank's session with its agent to `callback`, in a background thread; return the
        way out.
        """
        ...

    def call(self, request: Message, *, timeout_s: float = ...) -> Any:
        """Return the coordinators' response to one of the requests that a session carries."""
        ...

    def check(self) -> None:
        """Raise once the generation or the session has ended."""
        ...

    def close(self, *, code: int = 0, reason: str = "") -> None:
        """Leave; with a code other than 0 this rank has failed."""
        ...


class Alone:
    """The only rank of a training that no coordinator knows."""

    job = "default"
    worker_id = "alone"
    generation = 0
    rank = 0
    world_size = 1
    is_standalone = False
    detect_s = 0.0

    def __init__(self, *, world_size: int) -> None:
        """Refuse to be one of several: they could not agree on anything."""
        if world_size > 1:
            raise ConfigError(
                f"{world_size} processes train together, and no coordinator is known to them",
                hint="start them with `strata run`, or set STRATA_ENDPOINTS",
            )

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        return {0: payload} if payload else {}

    def progress(
        self,
        step: int,
        phase: str = "",
        *,
        own_s: float | None = None,
        data_wait_s: float | None = None,
        training: Callable[[], TrainingReport] | None = None,
    ) -> None:
        pass  # nobody listens

    def heed_notices(self) -> None:
        pass  # nobody needs to know

    def observe_world(self, callback: Callable[[WorldUpdate], None]) -> Callable[[], None]:
        return lambda: None  # it never changes

    def observe_place(self, callback: Callable[[RankPlace], None]) -> Callable[[], None]:
        return lambda: None  # there is no other

    def observe_end(self, callback: Callable[[StrataError], None]) -> Callable[[], None]:
        return lambda: None  # there is no agent

    def call(self, request: Message, *, timeout_s: float = 0.0) -> Any:
        raise Refused("this process trains alone: there are no coordinators to ask")

    def check(self) -> None:
        pass  # it never ends

    def close(self, *, code: int = 0, reason: str = "") -> None:
        pass  # nobody to tell
