"""`RankContext`: one rank's access to its world, the other ranks and the coordinators.

Two implementations: `RankClient`, over its session, and `Alone`, for a process that trains without coordinators.
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
        """Whether this is a standalone process: no agent restarts it or reports how it ended."""
        ...

    @property
    def detect_s(self) -> float:
        """The seconds within which a frozen process is detected; 0 if nothing watches for one."""
        ...

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        """Return every rank's payload once all ranks have arrived."""
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
        """Report this rank's progress; raises once its generation or session has ended.

        `own_s` is this rank's own time in the last step, compute time and data wait; `data_wait_s` is the data wait
        alone. If the report is sent, `training` is called in another thread, and returns the report on the training
        as a whole.
        """
        ...

    def support_graceful_stop(self) -> None:
        """Declare, from the next progress report on, that this rank stops by itself when its world must stop."""
        ...

    def observe_world(self, callback: Callable[[WorldUpdate], None]) -> Callable[[], None]:
        """Call `callback` with every update of the world, in a background thread; return a function that ends this."""
        ...

    def observe_place(self, callback: Callable[[RankPlace], None]) -> Callable[[], None]:
        """Call `callback` with this rank's place in a newer generation, in a background thread; return a function that
        ends this.
        """
        ...

    def observe_end(self, callback: Callable[[StrataError], None]) -> Callable[[], None]:
        """Call `callback` with the error that ends the session with this rank's agent, in a background thread; return a
        function that ends this.
        """
        ...

    def call(self, request: Message, *, timeout_s: float = ...) -> Any:
        """Send one of the requests that a session carries; return the coordinators' response."""
        ...

    def check(self) -> None:
        """Raise once the generation or the session has ended."""
        ...

    def close(self, *, code: int = 0, reason: str = "") -> None:
        """Leave; a code other than 0 reports that this rank has failed."""
        ...


class Alone:
    """The only rank of a training without coordinators."""

    job = "default"
    worker_id = "alone"
    generation = 0
    rank = 0
    world_size = 1
    is_standalone = False
    detect_s = 0.0

    def __init__(self, *, world_size: int) -> None:
        """`ConfigError` if `world_size` is above 1: several ranks cannot agree on anything without coordinators."""
        if world_size > 1:
            raise ConfigError(
                f"{world_size} processes train together, and they know no coordinator",
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
        pass  # there is nobody to report to

    def support_graceful_stop(self) -> None:
        pass  # there is no agent or coordinator to report it to

    def observe_world(self, callback: Callable[[WorldUpdate], None]) -> Callable[[], None]:
        return lambda: None  # the world never changes

    def observe_place(self, callback: Callable[[RankPlace], None]) -> Callable[[], None]:
        return lambda: None  # there is no other generation

    def observe_end(self, callback: Callable[[StrataError], None]) -> Callable[[], None]:
        return lambda: None  # there is no agent

    def call(self, request: Message, *, timeout_s: float = 0.0) -> Any:
        raise Refused("this process trains alone, without coordinators")

    def check(self) -> None:
        pass  # the generation never ends

    def close(self, *, code: int = 0, reason: str = "") -> None:
        pass  # there is nobody to report to
