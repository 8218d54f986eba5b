"""`DatasetFacts`: what gives a sample cursor its meaning.

A cursor is the number of samples of an epoch that completed steps have used. It says which samples these were only
together with the definition of the epoch's order. So a checkpoint holds both, and a training continues in the middle
of an epoch only if both are unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from strata.errors import DatasetMismatch

ORDER_V1: Final = "order-v1"
"""The permutation of `strata.data.order.Order`."""
SEQUENTIAL: Final = "sequential"
LOADER: Final = "loader"
"""The loader itself determines the order; Strata does not know it."""
MAX_FINGERPRINT_CHARS: Final = 256
DEFAULT: Final = "default"
"""The name of a dataset that the program has not named."""

_LABELS: Final = {
    "order": "its order",
    "length": "its number of samples",
    "seed": "the seed of its order",
    "fingerprint": "its fingerprint",
    "drawn": "what its sampler draws",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """The facts on a dataset in one epoch that must be equal on all ranks, and equal after a restart in that epoch.

    `length` counts the samples of an epoch, None if unknown. `fingerprint` is the program's own, "" for none.
    `drawn` is the digest of an order that a sampler drew, "" for a computed order.
    """

    dataset: str = DEFAULT
    order: str = LOADER
    length: int | None = None
    seed: int | None = None
    fingerprint: str = ""
    drawn: str = ""

    def saved(self) -> dict[str, Any]:
        """Return the facts as a checkpoint stores them."""
        return {name: value for name, value in asdict(self).items() if value not in {None, ""}}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Return the facts in a checkpoint's entry."""
        return cls(**{name: saved[name] for name in cls.__slots__ if name in saved})

    def digest(self) -> str:
        """Return a short text that is equal for equal facts only."""
        text = json.dumps(self.saved(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def differences(self, before: DatasetFacts) -> str:
        """Return how these facts differ from `before`, as a sentence's part; "" if they are equal."""
        return "; ".join(
            f"{label} is {_shown(getattr(self, name))}, and was {_shown(getattr(before, name))}"
            for name, label in _LABELS.items()
            if getattr(self, name) != getattr(before, name)
        )


def check_unchanged(now: DatasetFacts, before: DatasetFacts, *, epoch: int, cursor: int) -> None:
    """Raise `DatasetMismatch` unless the first `cursor` samples of `epoch` are the same with both facts."""
    where = f"sample {cursor} of epoch {epoch}"
    if now.dataset != before.dataset:
        raise DatasetMismatch(
            f"dataset {now.dataset!r} begins, but the training is at {where} of dataset {before.dataset!r}",
            hint=f"finish that epoch first, or leave it out: run.steps(loader, epoch={epoch + 1})",
        )
    what = now.differences(before)
    if not what and now.length is not None and cursor > now.length:
        what = f"it has only {now.length} samples"
    if what:
        raise DatasetMismatch(
            f"dataset {now.dataset!r}: {what}; the training is at {where}",
            hint="use the dataset and the settings of before; or leave out the rest of the epoch:"
            f" run.steps(loader, epoch={epoch + 1}); or accept that samples come twice or never:"
            " strata.init(exact_samples=False)",
        )


def _shown(value: object) -> str:
    return "unknown" if value in {None, ""} else str(value)
