"""Which tensors of a state all ranks hold alike, so that each writes only its share of them.

Here it is declared: by paths of the state or, where the ranks do not compare what they hold
(`sharing`), by a module in torch's DistributedDataParallel, whose parameters are alike. Its buffers
are not: each rank has its own until the next forward pass. Every rank hashes all of what it
declares, and the save fails when two differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

EVERYTHING: Final = ""
"""The path of the whole state."""
RNG_KEY: Final = "__rng__"
"""Where the states of the random generators stand: each rank has its own."""
WORLD: Final = "world"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Which of the processes that hold a tensor alike this one is; a `group` shares its writing."""

    number: int
    count: int
    group: Hashable


@dataclass(slots=True, kw_only=True)
class Replication:
    """What rank number `rank` of `ranks` declares: what stands under `paths`, and, if it `finds`, modules.

    `mesh` is its place, (index, size), in each named dimension of the partitioning.
    """

    rank: int
    ranks: int
    paths: frozenset[str] = frozenset()
    mesh: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    finds: bool = True
    _found: set[str] = field(default_factory=set)

    def look_at(self, key: str, value: Any) -> None:
        """Take note of a module whose parameters all ranks hold alike."""
        if not self.finds:
            return
        if type(value).__name__ == "DistributedDataParallel" and hasattr(value, "named_parameters"):
            self._found |= {f"{key}.{name}" if key else name for name, _ in value.named_parameters()}

    def of(self, key: str) -> Replica | None:
        """Return which replica this one is of the tensor under `key`; None when it is not replicated."""
        if self.ranks == 1 or not (key in self._found or self._declared(key)):
            return None
        return Replica(number=self.rank, count=self.ranks, group=WORLD)

    def _declared(self, key: str) -> bool:
        return any(
            path in (EVERYTHING, key) or key.startswith(f"{path}.") for path in self.paths
        ) and not is_random_state(key)


def is_random_state(key: str) -> bool:
    """Tell whether the state of a random generator stands under `key`."""
    return key.startswith(RNG_KEY)
