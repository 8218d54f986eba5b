"""Recorder of a client's operations, and the mapping from errors to outcomes."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from strata.errors import (
    BarrierBroken,
    CheckpointAborted,
    CheckpointNotFound,
    ConfigError,
    Conflict,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    StrataError,
)
from strata_chaos.history import Failure, HistoryWriter, Outcome, Record

DEFINITE: Final = (
    BarrierBroken,
    CheckpointAborted,
    CheckpointNotFound,
    ConfigError,
    Conflict,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
)
"""Errors that prove that the operation had no effect. After any other error the effect is unknown."""


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of an operation that raised this error: fail or unknown."""
    return Outcome.FAIL if isinstance(error, DEFINITE) else Outcome.UNKNOWN


@dataclass(slots=True)
class Operation:
    """A running operation. The contents of `result` are recorded when it ends."""

    args: dict[str, Any]
    result: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Writes the history of one client of one process. `clock` is CLOCK_BOOTTIME in seconds."""

    def __init__(self, writer: HistoryWriter, *, client: str, clock: Callable[[], float]) -> None:
        self.client = client
        self.clock = clock
        self._writer = writer
        self._pid = os.getpid()
        self._numbers = itertools.count(1)

    def note(self, op: str, *, result: dict[str, Any] | None = None, **args: Any) -> None:
        """Record an event with the present time."""
        now = self.clock()
        self._write(op, now, now, args, Outcome.OK, result or {})

    def started(self, role: str, **args: Any) -> None:
        """Report this process and its role to the nemesis, which may then kill or freeze it."""
        self.note("process.started", pid=self._pid, role=role, **args)

    @contextlib.contextmanager
    def operation(self, op: str, *, announce: bool = False, **args: Any) -> Iterator[Operation]:
        """Record the operation in the body and its outcome; an error is re-raised.

        `announce` also records the start. Use it for operations that may have an effect even if this process dies
        before they return.
        """
        running = Operation(args)
        identity = f"{self.client}.{self._pid}.{next(self._numbers)}"
        t0 = self.clock()
        if announce:
            self._write(op, t0, None, args, Outcome.UNKNOWN, {}, identity=identity)
        try:
            yield running
        except BaseException as error:
            message = error.message if isinstance(error, StrataError) else str(error)
            failure = Failure(type=type(error).__name__, message=message)
            self._write(
                op, t0, self.clock(), args, outcome_of(error), running.result, failure, identity=identity
            )
            raise
        self._write(op, t0, self.clock(), args, Outcome.OK, running.result, identity=identity)

    def _write(
        self,
        op: str,
        t0: float,
        t1: float | None,
        args: dict[str, Any],
        outcome: Outcome,
        result: dict[str, Any],
        failure: Failure | None = None,
        *,
        identity: str = "",
    ) -> None:
        self._writer.write(
            Record(
                client=self.client,
                process=self._pid,
                op=op,
                t0=t0,
                t1=t1,
                args=args,
                outcome=outcome,
                result=result,
                error=failure,
                id=identity,
            )
        )
