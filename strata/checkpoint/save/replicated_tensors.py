"""Which tensors of a state are replicated on all ranks, so that each rank writes only its share of them.

The caller declares these tensors, by paths of the state. If the ranks do not compare their tensors (`sharing`), the
parameters of a module in torch's DistributedDataParallel are also declared: they are equal on all ranks. The module's
buffers are not declared: each rank has its own until the next forward pass. Every rank hashes all declared tensors;
if two ranks differ, the save fails.
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
    """This process's number among the processes with the same tensor; the processes of a `group` share the writing."""

    number: int
    count: int
    group: Hashable


@dataclass(slots=True, kw_only=True)
class Replication:
    """Rank `rank` of `ranks` declares as replicated: all tensors under `paths` and, if `finds`, DDP parameters.

    `mesh` is the rank's place, (index, size), in each named dimension of the partitioning.
    """

    rank: int
    ranks: int
    paths: frozenset[str] = frozenset()
    mesh: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    finds: bool = True
    _found: set[str] = field(default_factory=set)

    def look_at(self, key: str, value: Any) -> None:
        """Record the parameters' paths if `value` is a DDP module: its parameters are equal on all ranks."""
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
