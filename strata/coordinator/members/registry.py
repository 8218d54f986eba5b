"""The sessions that are open at this replica, and whose they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from strata.coordinator.members.session import MemberSession
from strata.coordinator.view.rank_indexes import RankIndexes
from strata.v1 import session_pb2


class SessionRegistry:
    """Made before whoever opens sessions, and before whoever asks which there are."""

    def __init__(self, ranks: RankIndexes) -> None:
        self._ranks = ranks
        self._by_job: dict[str, dict[MemberSession, None]] = {}
        """In the order they came, so that a run can be repeated."""

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
        """Yield the ranks of the job's world that have their session here."""
        index = self._ranks.of(job)
        if index is not None:
            for member in self.of(job):
                yield from index.ranks(member.worker, member.incarnation)

    def inspect(self, job: str, rank: int) -> None:
        """Ask the member that runs a rank for evidence, if it is served here."""
        index = self._ranks.of(job)
        for member in self.of(job) if index is not None else ():
            if index is not None and rank in index.ranks(member.worker, member.incarnation):
                inspect = session_pb2.Inspect(generation=index.head.generation, rank=rank)
                member.send(session_pb2.Down(inspect=inspect))
