"""Looks in the view for what cannot be (`core.invariants`), and never acts on it.

Each job that changed is looked at again, at most every `PAUSE_S` and for a twentieth of the time. What is
found is reported: counted and logged once, and a trouble of its job for as long as it is
there. All replicas report the same, for each sees all of the keyspace.
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
"""How much of the loop's time looking may take: a job of a thousand members takes some milliseconds."""
REMEMBERED: Final = 1000
"""So many are told apart; what comes beyond is neither counted nor logged."""


class InvariantAudit:
    """`run` looks; `violations` says what was found of a job."""

    def __init__(self, mirror: Mirror, keys: ClusterKeys, measures: Measures) -> None:
        self._mirror = mirror
        self._keys = keys
        self._count = measures.violations.child()
        self._changed: set[str] = set()
        self._found: dict[str, Sequence[Violation]] = {}
        """By job, what the last look at it found."""
        self._known: set[Violation] = set()

    def violations(self, job: str) -> Sequence[str]:
        """Return what the job's keys say and cannot be."""
        return [violation.says for violation in self._found.get(job, ())]

    async def run(self) -> None:
        """Look, until cancelled."""
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
        except StrataError:  # no name that a job could have: written by hand, and nobody's job
            found = []
        except Exception:
            # what cannot be may break the look itself, and must not end the replica
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
