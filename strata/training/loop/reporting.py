"""What rank 0 reports of the training as a whole: shown on every page and in `strata top`, and kept for charts."""

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
    """The reports of one run. Of ranks other than 0 they are checked, and stay where they are."""

    def __init__(self, *, total_steps: int | None) -> None:
        self._target = 0 if total_steps is None else integer("total_steps", total_steps, below=2**63)
        self._values: dict[str, float] = {}

    def report(self, values: Mapping[str, Any]) -> None:
        """Keep the newest value of each name; `InvalidArgument`, and nothing is kept, if one cannot be."""
        new = {name: _number(name, value) for name, value in values.items()}
        names = {**self._values, **new}
        if len(names) > MAX_NAMES:
            raise InvalidArgument(
                f"{len(names)} names are reported, and at most {MAX_NAMES} can be",
                hint="report those that people look at; a name with a number in it becomes a new one each time",
            )
        self._values = names

    def message(self, rank: int, position: Position, goodput: Goodput) -> Callable[[], TrainingReport] | None:
        """Return what makes the message for the progress of rank 0, as of now; None for other ranks.

        Most steps' are never sent: it is made in another thread, if at all.
        """
        if rank != 0:
            return None
        # `report` replaces the values as a whole; the account goes on
        values, spent_s = self._values, dict(goodput.spent_s)
        return lambda: TrainingReport(
            epoch=position.epoch,
            samples=min(position.samples, 2**63 - 1),  # nobody is there to hear of an error
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
