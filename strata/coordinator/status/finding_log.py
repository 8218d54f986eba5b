"""The leader's log of findings: one line when something begins to be wrong with a job, one when it is over.

Only the leader logs them, so that each is logged once; a new leader logs again what is still wrong. Who wants to know at
another replica asks it: all diagnose alike (`coordinator.status.diagnosis`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from strata.coordinator.context import ReplicaContext
from strata.coordinator.status.diagnosis import Told, diagnose_job
from strata.core.health.findings import Finding
from strata.core.job import job_names
from strata.errors import StrataError
from strata.observe import get_logger

log = get_logger()

PAUSE_S: Final = 1.0
SHARE: Final = 0.02
"""How much of the loop's time diagnosing may take: a job of a thousand ranks takes some ten milliseconds."""
MAX_LOGGED: Final = 1000
"""Findings that are kept in mind; what comes beyond is not logged."""


class FindingLog:
    """`run` looks at all jobs while this replica leads; `note` logs what changed with one."""

    def __init__(self, context: ReplicaContext, told: Told) -> None:
        self._context = context
        self._told = told
        self._open: dict[str, dict[tuple[object, ...], tuple[Finding, float]]] = {}
        """By job: the findings that were logged, and when."""

    async def run(self) -> None:
        """Look, until cancelled."""
        now = asyncio.get_running_loop().time
        await self._context.mirror.started()
        while True:
            await asyncio.sleep(PAUSE_S)
            if self._context.election.epoch is None:
                self._open.clear()
                continue
            names = set(job_names(self._context.mirror.view, self._context.keys))
            for name in sorted(names | self._open.keys()):
                began_s = now()
                self.note(name, self._findings(name) if name in names else (), began_s)
                await asyncio.sleep((now() - began_s) / SHARE)

    def note(self, job: str, findings: Iterable[Finding], now_s: float) -> None:
        """Log what is wrong with a job now and was not before, and what is wrong no more."""
        before = self._open.pop(job, {})
        kept = sum(map(len, self._open.values()))
        open_: dict[tuple[object, ...], tuple[Finding, float]] = {}
        for finding in findings:
            known = before.pop(finding.key, None)
            if known is None and kept + len(open_) + len(before) >= MAX_LOGGED:
                continue
            open_[finding.key] = known or (finding, now_s)
            if known is None:
                _log(log.warning, "finding", job, finding)
        for finding, since_s in before.values():
            _log(log.info, "finding_over", job, finding, lasted_s=round(now_s - since_s, 1))
        if open_:
            self._open[job] = open_

    def _findings(self, name: str) -> Iterable[Finding]:
        try:
            return diagnose_job(self._told, self._context.job(name)).findings
        except StrataError:  # written by hand: a record, or the name itself
            return ()


def _log(say: Callable[..., object], event: str, job: str, finding: Finding, **more: object) -> None:
    say(
        event,
        job=job,
        kind=finding.kind,
        cause=finding.cause,
        ranks=finding.rank_runs or None,
        host=finding.host or None,
        device=finding.device,
        text=finding.text,
        **more,
    )
