"""`OrdinaryFeed`: the batches of a loader that can only be iterated over.

After a restart, batches that were trained on before are drawn and dropped. A batch is drawn only when it is needed,
since a loader may reuse the memory of one batch for the next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from strata.data.facts import DEFAULT, LOADER, DatasetFacts
from strata.errors import DatasetMismatch
from strata.training.save.state import Position

log: Final = logging.getLogger("strata.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """One batch of this rank. If it is the `last` of its step, the step used `samples` samples over all ranks.

    `batches` is the number of the step's batches so far; `weight` is the weight of the batch's mean loss in the step.
    `seed_after`: seeds the random generators when the step is complete; None: they go on.
    """

    batch: Any
    last: bool
    samples: int
    batches: int
    weight: float
    seed_after: int | None = None


class OrdinaryFeed:
    """Steps of a loader that is only iterated over."""

    def __init__(
        self,
        loader: Iterable[Any],
        accumulate: int,
        world_size: int,
        *,
        before: int | None = None,
        length: int | None = None,
        most: int | None = None,
        dataset: str = DEFAULT,
        exact: bool = True,
    ) -> None:
        """`before` is the number of data-parallel ranks that saved the position.

        `length` is the number of batches of an epoch, None if unknown; all ranks end an epoch after `most` batches.
        With `exact` a position that cannot be continued exactly is refused, not only logged.
        """
        self._loader = loader
        self._before = before
        self._length = length if most is None else most
        self._most = most
        self._accumulate = accumulate
        self._world_size = world_size
        self._dataset = dataset
        self._exact = exact

    def epoch(self, position: Position) -> Iterator[Fed]:
        batches = _Drawn(self._left(position))
        begun, count, samples = position.epoch_batches, 0, 0
        for batch in batches:
            count += 1
            samples += samples_of(batch)
            size, certain = self._size(begun)
            last = count == size or (not certain and batches.ended())
            yield Fed(
                batch=batch,
                last=last,
                samples=samples * self._world_size,
                batches=count,
                weight=1.0 if last and count == 1 else 1 / size,
            )
            if last:
                begun, count, samples = begun + count, 0, 0
        if count:
            log.warning(
                "the loader ended with %d of %s batches: no step has the last %d",
                begun + count,
                self._length,
                count,
            )

    def _left(self, position: Position) -> Iterator[Any]:
        """Return the remaining batches of the epoch, each drawn on request."""
        batches = islice(self._loader, self._most)
        if self._before not in {None, self._world_size} and position.epoch_batches:
            self._refuse(
                position,
                f"{self._before} ranks trained on this epoch, and there are {self._world_size} now: Strata cannot"
                " divide the rest of this loader's samples",
            )
        self._pass_over(batches, position.epoch_batches, position)
        return batches

    def _pass_over(self, batches: Iterator[Any], count: int, position: Position) -> None:
        """Draw and drop `count` batches of an epoch that were trained on before."""
        if count:
            log.warning(
                "skipping %d batches of epoch %d that were trained on before: correct only for a loader"
                " that gives the same batches in each run",
                count,
                position.epoch,
            )
        passed = sum(1 for _ in islice(batches, count))
        if passed < count:
            self._refuse(position, f"the loader ended {count - passed} batches before this position")

    def _refuse(self, position: Position, why: str) -> None:
        """Raise `DatasetMismatch`, or only log it if the position need not be exact."""
        where = f"dataset {self._dataset!r} at sample {position.epoch_samples} of epoch {position.epoch}"
        if not self._exact:
            log.warning("%s: %s; some samples come twice, or not at all", where, why)
            return
        raise DatasetMismatch(
            f"{where}: {why}",
            hint="go on with the world and the data of before; or leave out the rest of the epoch:"
            f" run.steps(loader, epoch={position.epoch + 1}); or accept that samples come twice or never:"
            " strata.init(exact_samples=False). A map-style dataset goes on in any world",
        )

    def described(self, epoch: int) -> DatasetFacts:
        return DatasetFacts(dataset=self._dataset, order=LOADER)

    def size(self) -> int | None:
        return self._length

    def _size(self, begun: int) -> tuple[int, bool]:
        """Return the number of batches of the step that follows `begun` batches, and whether the number is certain.

        An uncertain number is an upper bound: the epoch's last step may have fewer batches. If the smaller number
        is known in time, each batch of the step gets a larger weight.
        """
        if self._length is None or begun >= self._length:  # unknown, or the loader has more than its length
            return self._accumulate, False
        return min(self._accumulate, self._length - begun), True

    def facts(self, position: Position) -> dict[str, Any]:
        return {"world_size": self._world_size}


class _Drawn:
    """Items that are drawn one by one; `ended` draws the next item early to see whether there is one."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._ahead: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._items)

    def ended(self) -> bool:
        if not self._ahead:
            self._ahead.extend(islice(self._items, 1))
        return not self._ahead


def samples_of(batch: Any) -> int:
    """Return the number of samples in a batch, or 1 if its type does not show it."""
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), None)
    elif isinstance(batch, list | tuple) and batch and hasattr(batch[0], "__len__"):
        batch = batch[0]
    try:
        return len(batch)
    except TypeError:  # a number, or a tensor of no dimension
        return 1
