"""The leader's log of findings: one line when a problem of a job begins, one when it is over.

Only the leader logs findings, so that each finding is logged once. A new leader logs open findings again. All
replicas make the same diagnosis (`coordinator.status.diagnosis`), so any replica can be queried for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from strata.coordinator.context import ReplicaContext
from strata.coordinator.status.diagnosis import LiveReports, diagnose_job
from strata.core.health.findings import Finding
from strata.core.job import job_names
from strata.errors import StrataError
from strata.observe import get_logger

log = get_logger()

PAUSE_S: Final = 1.0
SHARE: Final = 0.02
"""The share of the loop's time for diagnoses: a job of a thousand ranks takes about ten milliseconds."""
MAX_LOGGED: Final = 1000
"""Open findings that are remembered; further ones are not logged."""


class FindingLog:
    """`run` diagnoses all jobs while this replica leads; `note` logs the changes of one job."""

    def __init__(self, context: ReplicaContext, live: LiveReports) -> None:
        self._context = context
        self._live = live
        self._open: dict[str, dict[tuple[object, ...], tuple[Finding, float]]] = {}
        """By job: the logged findings, each with the time of its first log line."""

    async def run(self) -> None:
        """Diagnose all jobs again and again, until cancelled."""
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
        """Log a job's new findings, and the findings that are over."""
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
            return diagnose_job(self._live, self._context.job(name)).findings
        except StrataError:  # a hand-written record or job name
            return ()


def _log(log_line: Callable[..., object], event: str, job: str, finding: Finding, **more: object) -> None:
    log_line(
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
