"""Which jobs are shown, where there are more than anybody would read.

Jobs stay in the keyspace when they have ended, so there may be thousands. What is made of each, for
a page or for a scrape, is made in the loop that serves barriers.
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
    """Return the names, in order, of the jobs to show: all of them, or `most`.

    Those with members come first, then those that changed last.
    """
    names = job_names(view, keys)
    if len(names) <= most:
        return names

    def weight(name: str) -> tuple[bool, int]:
        try:
            job = keys.job(name)
        except StrataError:  # written by hand
            return False, 0
        changed = max(view.mod_revision(key) for key in (job.spec, job.head, job.phase))
        return bool(view.names(job.workers)), changed

    return sorted(heapq.nlargest(most, names, key=weight))
