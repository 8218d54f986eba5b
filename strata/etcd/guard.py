"""Nobody goes back in time: which answers of etcd are believed at all (PROTOCOLS 3.1).

1. The cluster id is fixed by the first answer. An answer from another cluster is never believed: an
   endpoint points elsewhere, or etcd was replaced.
2. A linearizable answer is of a revision at least as new as any that was known *before its request was sent*.
   One that is older proves that etcd lost what it had: an older snapshot was put under it, or its disks are new. It is
   told apart from 3 by `ClusterReplaced`: no other member knows better. Any answer teaches a revision, a stale read and a
   watch too: what a member has applied, a majority has committed.
3. The raft term only grows in a cluster, and a linearizable answer needs a majority of its term. So an answer with a
   term below one that was known before its request was sent comes from a member that is cut off since (serializable
   read, watch), and another one is asked.

The floor is taken when the request is sent: two answers may overtake each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from strata.core.restore.lineage import THE_WAY_BACK
from strata.errors import ClusterReplaced, Unavailable


class Header(Protocol):
    """The part of etcd's answer header that is looked at."""

    @property
    def cluster_id(self) -> int: ...
    @property
    def raft_term(self) -> int: ...
    @property
    def revision(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Floor:
    """What was known when a request was sent."""

    term: int = 0
    revision: int = 0


class Guard:
    """The cluster's identity, and the highest raft term and revision seen through any endpoint."""

    __slots__ = ("cluster_id", "revision", "term")

    def __init__(self) -> None:
        self.cluster_id = 0
        self.term = 0
        self.revision = 0

    @property
    def floor(self) -> Floor:
        """What the answer to a request that is sent now is measured by."""
        return Floor(self.term, self.revision)

    def admit(self, header: Header, floor: Floor, endpoint: str, *, linearizable: bool = False) -> None:
        """Learn from an answer, or raise `ClusterReplaced` or `Unavailable` and learn nothing.

        `linearizable`: the answer is one of the key-value service's, and not a stale read.
        """
        cluster_id, term = header.cluster_id, header.raft_term
        if not cluster_id:
            # some maintenance calls (Defragment) are answered with an empty header
            return
        if cluster_id != self.cluster_id:
            if self.cluster_id:
                raise ClusterReplaced(
                    f"etcd {endpoint} belongs to cluster {cluster_id:x}, not {self.cluster_id:x}"
                )
            self.cluster_id = cluster_id
        if linearizable and header.revision < floor.revision:
            raise ClusterReplaced(
                f"etcd {endpoint} is at revision {header.revision}, and was at {floor.revision}"
            )
        if term < floor.term:
            raise Unavailable(
                f"etcd {endpoint} answered in raft term {term}, {floor.term} was seen before",
                hint=f"if this lasts, an etcd that was restored by hand answers; the way back: {THE_WAY_BACK}",
            )
        self.term = max(self.term, term)
        self.revision = max(self.revision, header.revision)
