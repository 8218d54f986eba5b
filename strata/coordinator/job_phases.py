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
        for event in batch.events:
            match self._keys.parts(event.kv.key):
                case ("jobs", job, *_):
                    self._changed.add(job)
                case _:
                    pass

    def phases(self) -> Mapping[str, str]:
        """Return the phase of each job."""
        for name in self._changed:
            if self._view.names(f"{self._keys.jobs}{name}"):
                self._phases[name] = phase_of(self._view, self._keys, name)
            else:
                self._phases.pop(name, None)
        self._changed.clear()
        return self._phases


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
