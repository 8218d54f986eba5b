"""All faults: `ALL` maps names to faults, in listing order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strata_chaos.faults import etcd, partitions, processes, restores
from strata_chaos.faults.base import Effect, Fault, NoTarget, Wound

_EACH: Final[tuple[Fault, ...]] = (*processes.FAULTS, *partitions.FAULTS, *etcd.FAULTS, *restores.FAULTS)
ALL: Final[Mapping[str, Fault]] = {fault.name: fault for fault in _EACH}
LOSSES: Final = frozenset(fault.name for fault in restores.FAULTS)
"""Names of the faults that lose etcd's data."""


def usable(backend: str) -> list[str]:
    """Return the names of the faults that a backend supports."""
    return [name for name, fault in ALL.items() if not fault.available(backend)]


__all__ = ["ALL", "LOSSES", "Effect", "Fault", "NoTarget", "Wound", "usable"]
