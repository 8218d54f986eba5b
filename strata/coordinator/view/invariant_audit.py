"""The invariant audit: checks the view for violations of `core.invariants`, and never acts on them.

Each changed job is checked again, at most every `PAUSE_S`. Checks take at most a twentieth of the loop's time.
A violation is counted and logged once, and is a finding of its job as long as it exists. All replicas report the same
violations, since each sees all of the keyspace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from strata.coordinator.measures import Measures
from strata.coordinator.view.mirror import Mirror
from strata.core.invariants import Violation, check_job
from strata.core.job import job_names
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.txn import WatchBatch
from strata.errors import StrataError
from strata.observe import get_logger

log = get_logger()

PAUSE_S: Final = 5.0
SHARE: Final = 0.05
"""The share of the loop's time for checks: a job of a thousand members takes some milliseconds."""
REMEMBERED: Final = 1000
"""Violations that are remembered; further ones are neither counted nor logged."""


class InvariantAudit:
    """`run` checks; `violations` returns the result for a job."""

    def __init__(self, mirror: Mirror, keys: ClusterKeys, measures: Measures) -> None:
        self._mirror = mirror
        self._keys = keys
        self._count = measures.violations.child()
        self._changed: set[str] = set()
        self._found: dict[str, Sequence[Violation]] = {}
        """By job: the violations of the last check."""
        self._known: set[Violation] = set()

    def violations(self, job: str) -> Sequence[str]:
        """Return the invariants that the job's keys violate."""
        return [violation.says for violation in self._found.get(job, ())]

    async def run(self) -> None:
        """Check until cancelled."""
        await self._mirror.started()
        self._changed.update(job_names(self._mirror.view, self._keys))
        leave = self._mirror.subscribe(self._take)
        now = asyncio.get_running_loop().time
        try:
            while True:
                await asyncio.sleep(PAUSE_S)
                for job in sorted(self._changed | self._found.keys()):
                    began = now()
                    self._look(job)
                    await asyncio.sleep((now() - began) / SHARE)
        finally:
            leave()

    def _take(self, batch: WatchBatch) -> None:
        for event in batch.events:
            if (job := self._keys.job_of(event.kv.key)) is not None:
                self._changed.add(job)

    def _look(self, job: str) -> None:
        self._changed.discard(job)
        try:
            found = check_job(self._mirror.view, self._keys, job)
        except StrataError:  # an invalid job name, written by hand, which belongs to no job
            found = []
        except Exception:
            # a state that violates invariants may break the check itself; that must not end the replica
            log.exception("invariants_not_checked", job=job)
            found = []
        self._found.pop(job, None)
        if found:
            self._found[job] = found
        for violation in found:
            self._report(violation)

    def _report(self, violation: Violation) -> None:
        if violation in self._known or len(self._known) >= REMEMBERED:
            return
        self._known.add(violation)
        self._count.add()
        log.error("invariant_violated", job=violation.job, key=violation.key, what=violation.says)
        if len(self._known) == REMEMBERED:
            log.error("invariants_violated_beyond_count", remembered=REMEMBERED)
