"""`TrainingReporter`: rank 0's report on the training as a whole, shown on the dashboard and in `strata top`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strata.client.api.arguments import integer, phase
from strata.core.health.goodput import Goodput
from strata.core.health.reported import MAX_NAME_CHARS, MAX_NAMES, is_name
from strata.errors import InvalidArgument
from strata.training.save.state import Position
from strata.v1.members_pb2 import TrainingReport


class TrainingReporter:
    """The reports of one run. On ranks other than 0 the values are checked, but not sent."""

    def __init__(self, *, total_steps: int | None) -> None:
        self._target = 0 if total_steps is None else integer("total_steps", total_steps, below=2**63)
        self._values: dict[str, float] = {}

    def values(self) -> dict[str, float]:
        """Return the newest value of each name."""
        return self._values

    def report(self, values: Mapping[str, Any]) -> None:
        """Keep the newest value of each name; if a value is invalid, keep none and raise `InvalidArgument`."""
        new = {name: _number(name, value) for name, value in values.items()}
        names = {**self._values, **new}
        if len(names) > MAX_NAMES:
            raise InvalidArgument(
                f"{len(names)} names are reported, and at most {MAX_NAMES} can be",
                hint="report fewer; a name with a number in it becomes a new name each time",
            )
        self._values = names

    def message(self, rank: int, position: Position, goodput: Goodput) -> Callable[[], TrainingReport] | None:
        """Return a function that makes the message for rank 0's progress as of now; None for other ranks.

        Most steps' messages are never sent, so the message is made only on demand, in another thread.
        """
        if rank != 0:
            return None
        # `report` replaces the values as a whole, so no copy is needed; the account changes in place, so it is copied
        values, spent_s = self._values, dict(goodput.spent_s)
        return lambda: TrainingReport(
            epoch=position.epoch,
            samples=min(position.samples, 2**63 - 1),  # an error in that thread would reach nobody
            target_step=self._target,
            reported=values,
            goodput_s={phase(name): spent for name, spent in spent_s.items()},
        )


def _number(name: str, value: Any) -> float:
    if not isinstance(name, str) or not is_name(name):
        raise InvalidArgument(
            f"{str(name)[:80]!r} is no name for a value: 1 to {MAX_NAME_CHARS} of letters, digits and ._/-,"
            " the first a letter or a digit"
        )
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several elements
        raise InvalidArgument(
            f"{name}={type(value).__name__} is no number", hint="report one number, such as loss.item()"
        ) from error
