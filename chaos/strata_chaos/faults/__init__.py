"""Every fault there is; `ALL` by name, in the order in which they are listed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strata_chaos.faults import etcd, partitions, processes
from strata_chaos.faults.base import Effect, Fault, NoTarget, Wound

_EACH: Final[tuple[Fault, ...]] = (*processes.FAULTS, *partitions.FAULTS, *etcd.FAULTS)
ALL: Final[Mapping[str, Fault]] = {fault.name: fault for fault in _EACH}


def usable(backend: str) -> list[str]:
    """Return the names of the faults that can be had on a backend."""
    return [name for name, fault in ALL.items() if not fault.available(backend)]


__all__ = ["ALL", "Effect", "Fault", "NoTarget", "Wound", "usable"]
