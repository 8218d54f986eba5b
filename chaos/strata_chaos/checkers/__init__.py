"""Judges: each says of one part of the protocols whether a recorded run kept it.

They share no code with Strata (an import contract says so): keys and values are read anew from
`docs/keyspace.md`, images from `docs/checkpoints.md`. An operation whose outcome is unknown may have
had its effect or not, so a checker accepts both, and never takes it for a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from strata_chaos.checkers.barriers import Barriers
from strata_chaos.checkers.catalog import Catalog
from strata_chaos.checkers.findings import Checker, Findings, Violation
from strata_chaos.checkers.leadership import Leadership
from strata_chaos.checkers.restores import Restores
from strata_chaos.checkers.samples import Samples
from strata_chaos.checkers.watches import Watches
from strata_chaos.checkers.worker_registry import Registry
from strata_chaos.checkers.worlds import Worlds

ALL: Final[tuple[Callable[[], Checker], ...]] = (
    Leadership,
    Registry,
    Worlds,
    Barriers,
    Catalog,
    Restores,
    Samples,
    Watches,
)

__all__ = ["ALL", "Checker", "Findings", "Violation"]
