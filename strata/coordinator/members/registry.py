"""The open sessions at this replica, by job."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from strata.coordinator.members.session import MemberSession
from strata.coordinator.view.rank_indexes import RankIndexes
from strata.v1 import session_pb2


class SessionRegistry:
    """The registry of open sessions, made before the parts of the replica that open or list sessions."""

    def __init__(self, ranks: RankIndexes) -> None:
        self._ranks = ranks
        self._by_job: dict[str, dict[MemberSession, None]] = {}
        """In the order of their opening, so that a simulation run can be repeated."""

    def add(self, member: MemberSession) -> None:
        self._by_job.setdefault(member.job, {})[member] = None

    def remove(self, member: MemberSession) -> None:
        members = self._by_job.get(member.job, {})
        members.pop(member, None)
        if not members:
            self._by_job.pop(member.job, None)

    def of(self, job: str) -> Collection[MemberSession]:
        """Return the sessions of a job's members."""
        return self._by_job.get(job, {})

    def everybody(self) -> list[MemberSession]:
        """Return all sessions."""
        return [member for members in self._by_job.values() for member in members]

    def ranks(self, job: str) -> Iterator[int]:
        """Yield the ranks of the job's world that have an open session at this replica."""
        index = self._ranks.of(job)
        if index is not None:
            for member in self.of(job):
                yield from index.ranks(member.worker, member.incarnation)

    def inspect(self, job: str, rank: int) -> None:
        """Request evidence from the member that runs a rank, if the member's session is at this replica."""
        index = self._ranks.of(job)
        for member in self.of(job) if index is not None else ():
            if index is not None and rank in index.ranks(member.worker, member.incarnation):
                inspect = session_pb2.Inspect(generation=index.head.generation, rank=rank)
                member.send(session_pb2.Down(inspect=inspect))
