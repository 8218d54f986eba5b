"""Nobody goes back in time: which answers of etcd are believed at all (PROTOCOLS 3.1).

The cluster id is fixed by the first answer. An answer from another cluster is never believed: an
endpoint points elsewhere, or etcd was replaced.

The raft term only grows in a cluster, and a linearizable answer needs a majority of its term. So a
linearizable answer with a term below one that was known *before its request was sent* cannot
exist, unless the member was restored from a backup or lost its disk; and a stale local one
(serializable read, watch) comes from a member cut off since. Both are refused. The floor is taken
when the request is sent: two answers may overtake each other.
"""

from __future__ import annotations

from typing import Protocol

from strata.errors import ClusterReplaced, Unavailable


class Header(Protocol):
    """The part of etcd's answer header that is looked at."""

    @property
    def cluster_id(self) -> int: ...
    @property
    def raft_term(self) -> int: ...


class Guard:
    """The cluster's identity and the highest raft term seen through any endpoint."""

    __slots__ = ("cluster_id", "term")

    def __init__(self) -> None:
        self.cluster_id = 0
        self.term = 0

    def admit(self, header: Header, floor: int, endpoint: str) -> None:
        """Learn from an answer, or raise `ClusterReplaced` or `Unavailable` and learn nothing."""
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
        if term < floor:
            raise Unavailable(f"etcd {endpoint} answered in raft term {term}, {floor} was seen before")
        self.term = max(self.term, term)
