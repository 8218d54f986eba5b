"""Which tensors of a state are replicated on all ranks, so that each rank writes only its share of them.

This is the declared kind: by paths of the state or, if the ranks do not compare their tensors (`sharing`), by a
module in torch's DistributedDataParallel, whose parameters are equal on all ranks. Its buffers are not: each rank
has its own until the next forward pass. Every rank hashes all that it declares; if two ranks differ, the save
fails.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

EVERYTHING: Final = ""
"""The path of the whole state."""
RNG_KEY: Final = "__rng__"
"""The path of the random generators' states: each rank has its own."""
WORLD: Final = "world"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """This process's number among the processes that hold the same tensor; a `group` shares the writing."""

    number: int
    count: int
    group: Hashable


@dataclass(slots=True, kw_only=True)
class Replication:
    """What rank `rank` of `ranks` declares as replicated: all under `paths` and, if `finds`, DDP modules.

    `mesh` is the rank's place, (index, size), in each named dimension of the partitioning.
    """

    rank: int
    ranks: int
    paths: frozenset[str] = frozenset()
    mesh: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    finds: bool = True
    _found: set[str] = field(default_factory=set)

    def look_at(self, key: str, value: Any) -> None:
        """Record the parameters' paths if `value` is a DDP module: all ranks hold these equal."""
        if not self.finds:
            return
        if type(value).__name__ == "DistributedDataParallel" and hasattr(value, "named_parameters"):
            self._found |= {f"{key}.{name}" if key else name for name, _ in value.named_parameters()}

    def of(self, key: str) -> Replica | None:
        """Return this process's number among the holders of the tensor at `key`; None if it is not replicated."""
        if self.ranks == 1 or not (key in self._found or self._declared(key)):
            return None
        return Replica(number=self.rank, count=self.ranks, group=WORLD)

    def _declared(self, key: str) -> bool:
        return any(
            path in (EVERYTHING, key) or key.startswith(f"{path}.") for path in self.paths
        ) and not is_random_state(key)


def is_random_state(key: str) -> bool:
    """Return whether `key` is a path in the states of the random generators."""
    return key.startswith(RNG_KEY)
