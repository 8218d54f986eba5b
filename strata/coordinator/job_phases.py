"""Where each job stands, as people see it: kept up to date by the watch, for lists of thousands of jobs."""

from __future__ import annotations

from collections.abc import Mapping

from strata.core.job import JobView, job_names
from strata.core.keys import ClusterKeys
from strata.core.records import JobPhase, Phase
from strata.core.txn import WatchBatch
from strata.core.view import View
from strata.errors import StrataError


class JobPhases:
    """The phase of every job, by name. A subscriber of the mirror; jobs that changed are looked at when asked."""

    def __init__(self, view: View, keys: ClusterKeys) -> None:
        self._view = view
        self._keys = keys
        self._phases: dict[str, str] = {}
        self._changed: set[str] = set()

    def begin(self) -> None:
        """Learn which jobs there are. To be called before the first batch."""
        self._changed.update(job_names(self._view, self._keys))

    def take(self, batch: WatchBatch) -> None:
        """Take note of the jobs that a batch changes."""
        jobs: set[str] = set()
        for event in batch.events:
            match self._keys.parts(event.kv.key):
                case ("jobs", job, *_):
                    jobs.add(job)
                case _:
                    pass
        for job in jobs:
            if self._exists(job):
                self._changed.add(job)
            else:  # nobody may ask for years
                self._changed.discard(job)
                self._phases.pop(job, None)

    def phases(self) -> Mapping[str, str]:
        """Return the phase of each job."""
        for name in self._changed:
            self._phases[name] = phase_of(self._view, self._keys, name)
        self._changed.clear()
        return self._phases

    def waiting(self) -> int:
        """Return how many jobs are to be looked at when somebody asks: at most those that there are."""
        return len(self._changed)

    def _exists(self, name: str) -> bool:
        return self._view.count(f"{self._keys.jobs}{name}") > 0


def phase_of(view: View, keys: ClusterKeys, name: str) -> str:
    """Return where a job stands: `waiting` for members, or `stopping`, where its record says `running`."""
    try:
        job = JobView(view, keys.job(name))
        head, record = job.head(), view.record(job.keys.phase, JobPhase)
        if record is not None and record.phase is not Phase.RUNNING:
            return str(record.phase.value)
        if head is None or not head.record.size:
            return "waiting"
        return "stopping" if job.notice(head.record.generation) is not None else "running"
    except StrataError:  # written by hand: a record, or the name itself
        return "unreadable"
