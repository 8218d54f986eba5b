"""Checkers: each judges whether a recorded run followed one part of the protocols.

They share no code with Strata (an import contract enforces this). They parse keys and values by `docs/keyspace.md`,
and images by `docs/checkpoints.md`. An operation with unknown outcome may or may not have had its effect: a checker
must accept both cases, and must not treat the operation as failed.
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
