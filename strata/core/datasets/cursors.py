"""The sample cursors of a job's datasets, as the newest checkpoint records them in its metadata (PROTOCOLS 7.3).

The trainer writes them (`strata.training.loop.training_data`), and they are committed with the checkpoint. Metadata may
come from any program, so entries that are no cursor are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strata.documents.parsing import NOTE, json_object

SAMPLES_KEY: Final = "strata.datasets"
"""The key of the cursors in a checkpoint's metadata."""
MOST_DATASETS: Final = 32
"""The limit of datasets with a cursor per checkpoint."""
_MAX_CHARS: Final = 128
_MAX: Final = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCursor:
    """How far completed optimizer steps have used one dataset: `samples` samples of `epoch`.

    An epoch has `length` samples, 0 if unknown. `order` names the definition of their order.
    """

    dataset: str
    epoch: int
    samples: int
    length: int = 0
    order: str = ""
    seed: int | None = None


def cursors_of(metadata: Mapping[str, str]) -> tuple[SampleCursor, ...]:
    """Return the cursors in a checkpoint's metadata, by dataset."""
    try:
        saved = json_object(metadata.get(SAMPLES_KEY, "{}"), NOTE)
    except ValueError:
        return ()
    found = (_cursor(name, saved[name]) for name in sorted(saved)[:MOST_DATASETS])
    return tuple(cursor for cursor in found if cursor is not None)


def _cursor(name: str, entry: Any) -> SampleCursor | None:
    if not isinstance(entry, dict) or len(name) > _MAX_CHARS:
        return None
    epoch, samples, length = (_count(entry.get(key, 0)) for key in ("epoch", "cursor", "length"))
    order, seed = entry.get("order", ""), entry.get("seed")
    if epoch is None or samples is None or length is None or not isinstance(order, str):
        return None
    return SampleCursor(
        dataset=name,
        epoch=epoch,
        samples=samples,
        length=length,
        order=order[:_MAX_CHARS],
        seed=seed if isinstance(seed, int) and abs(seed) < _MAX else None,
    )


def _count(value: object) -> int | None:
    valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX
    return value if valid else None  # type: ignore[return-value]  # `valid` checks it
