"""Selection of the jobs that a page or a scrape shows, if there are more than `MAX_JOBS`.

Jobs stay in the keyspace after they end, so there may be thousands of them. Every page and scrape reads the jobs in
the event loop, which also serves barriers.
"""

from __future__ import annotations

import heapq
from typing import Final

from strata.core.job import job_names
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.view import View
from strata.errors import StrataError

MAX_JOBS: Final = 500


def shown_jobs(view: View, keys: ClusterKeys, *, most: int = MAX_JOBS) -> list[str]:
    """Return the names of the jobs to show, sorted: all jobs, or `most` of them.

    Jobs with members are chosen first, then the most recently changed ones.
    """
    names = job_names(view, keys)
    if len(names) <= most:
        return names

    def weight(name: str) -> tuple[bool, int]:
        try:
            job = keys.job(name)
        except StrataError:  # a key that somebody wrote by hand
            return False, 0
        changed = max(view.mod_revision(key) for key in (job.spec, job.head, job.phase))
        return bool(view.names(job.workers)), changed

    return sorted(heapq.nlargest(most, names, key=weight))
