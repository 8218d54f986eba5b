"""Guard: no client goes back in time. Decides which answers of etcd are accepted (PROTOCOLS 3.1).

1. The first answer fixes the cluster id. An answer from another cluster is never accepted: in that case an
   endpoint points to another etcd, or etcd was replaced.
2. A linearizable answer has a revision at least as new as any that was known *before its request was sent*. An
   older revision proves that etcd lost data: etcd was started from an older snapshot, or its disks are new. The
   error is `ClusterReplaced`, unlike in case 3, because no other member has the data. Any answer raises the known
   revision, even the answer of a stale read or a watch: everything that a member has applied is committed by a
   majority.
3. The raft term only grows in a cluster, and a linearizable answer needs a majority of its term. A serializable
   read or a watch may return an older term than was known before its request was sent. In this case the member that
   answers has been cut off from the majority, and the call goes to another member.

The floor (the known term and revision) is read when the request is sent, since two answers may overtake each
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from strata.core.restore.lineage import THE_WAY_BACK
from strata.errors import ClusterReplaced, Unavailable


class Header(Protocol):
    """The fields of etcd's answer header that the guard checks."""

    @property
    def cluster_id(self) -> int: ...
    @property
    def raft_term(self) -> int: ...
    @property
    def revision(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Floor:
    """The term and revision known when a request was sent."""

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
        """The minimum for the answer to a request that is sent now."""
        return Floor(self.term, self.revision)

    def admit(self, header: Header, floor: Floor, endpoint: str, *, linearizable: bool = False) -> None:
        """Learn from an answer, or raise `ClusterReplaced` or `Unavailable` and learn nothing.

        `linearizable`: the answer comes from the key-value service, and not from a serializable read.
        """
        cluster_id, term = header.cluster_id, header.raft_term
        if not cluster_id:
            # some maintenance calls (Defragment) have an empty header in the answer
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
