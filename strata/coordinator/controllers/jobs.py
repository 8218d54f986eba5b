"""The base of controllers that work job by job: which jobs are due, and when again.

An error affects only its own job. If a hand-written record or a bug makes the work on one job fail, the error is
logged, and that work is retried after growing pauses. The other jobs go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar, Final

from strata.coordinator.controllers.loop import Backoff, report
from strata.coordinator.view.mirror import Mirror
from strata.core.job import job_names
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.txn import WatchBatch
from strata.errors import NotLeader

EVERY_S: Final = 30.0
"""How often every job is due without a change."""


class JobController:
    """A controller that works on the due jobs one after the other; a subclass defines `work`.

    Three arguments name the keys whose changes make a job due. `folders`: folders of the job's keys. `barriers`:
    names of barriers. `attempts`: parts of a checkpoint attempt; if any part is named, a change of the attempt's
    record makes the job due too.
    """

    name: ClassVar[str]
    tick_s: float = EVERY_S
    folders: ClassVar[frozenset[str]]
    barriers: ClassVar[frozenset[str]] = frozenset()
    attempts: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, *, keys: ClusterKeys, mirror: Mirror) -> None:
        self._keys = keys
        self._mirror = mirror
        self._due: dict[str, float] = {}
        self._failing: dict[str, Backoff] = {}
        self._all_at = 0.0

    async def work(self, name: str) -> float | None:
        """Do one job's missing work; return the seconds until it is due again, or None to wait for a change."""
        raise NotImplementedError

    def wants(self, batch: WatchBatch) -> bool:
        """Record a change; return whether it made a job due."""
        found = False
        for event in batch.events:
            match self._keys.parts(event.kv.key):
                case ("jobs", job, folder, *rest) if folder in self.folders or self._below(folder, rest):
                    if job not in self._failing:
                        self._due[job] = 0.0
                        found = True
        return found

    def _below(self, folder: str, rest: Sequence[str]) -> bool:
        """True if this key makes its job due, although its folder as a whole does not."""
        if folder == "barriers":
            return bool(rest) and rest[0] in self.barriers
        if folder == "checkpoints" and self.attempts:
            return len(rest) == 2 or (len(rest) > 3 and rest[3] in self.attempts)
        return False

    def all_due(self) -> None:
        """Make every job due in the next turn."""
        self._all_at = 0.0

    async def turn(self) -> float | None:
        """Work on every due job; return the seconds until the next one is due."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now >= self._all_at:
            self._all_at = now + EVERY_S
            self._due.update({job: min(now, self._due.get(job, now)) for job in self._idle()})
        for job in sorted(job for job, due in self._due.items() if due <= now):
            del self._due[job]
            try:
                delay_s = await self.work(job)
            except NotLeader:
                raise
            except Exception as error:  # noqa: BLE001  # an error in the work on one job must not stop the others
                report(self.name, error, job=job)
                delay_s = self._failing.setdefault(job, Backoff()).failed()
            else:
                self._failing.pop(job, None)
            if delay_s is not None:
                soon = loop.time() + delay_s
                self._due[job] = min(soon, self._due.get(job, soon))
        return min((due - loop.time() for due in self._due.values()), default=None)

    def _idle(self) -> list[str]:
        return [job for job in job_names(self._mirror.view, self._keys) if job not in self._failing]
