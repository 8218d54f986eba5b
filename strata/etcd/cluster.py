"""etcd's members: list, status, alarms, and membership changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from strata.errors import NotFound, StrataError
from strata.etcd.connection import Connection
from strata.etcd.endpoint import Endpoint
from strata.etcd.snapshot import IDLE_S, stream
from strata.etcdapi import cluster_pb2, maintenance_pb2

SLOW_S = 60.0
"""Time limit of calls that work through a whole database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member as the cluster knows it; `name` is empty until the member has started once."""

    id: int
    name: str
    peer_urls: tuple[str, ...]
    client_urls: tuple[str, ...]
    learner: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One endpoint's own view; `leader_id` 0 means that it knows no leader."""

    endpoint: str
    cluster_id: int
    member_id: int
    version: str
    leader_id: int
    raft_term: int
    raft_index: int
    revision: int
    db_bytes: int
    db_bytes_in_use: int
    learner: bool
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """An alarm that a member raised: NOSPACE or CORRUPT."""

    member_id: int
    kind: str


class Cluster:
    """etcd's Cluster and Maintenance services."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def members(self, *, linearizable: bool = True) -> tuple[Member, ...]:
        """Return every member. If not `linearizable`, the answer is one endpoint's own list, which needs no quorum."""
        request = cluster_pb2.MemberListRequest(linearizable=linearizable)
        answer = await self._connection.repeated(lambda at: at.cluster.MemberList, request)
        return tuple(_member(member) for member in answer.members)

    async def status(self, endpoint: str | None = None, *, timeout_s: float | None = None) -> MemberStatus:
        """Return the status of one endpoint, or of any; `Refused` if the user may not read it.

        From 3.5.30 at the latest, etcd returns the status only to a user with the role `root`.
        """
        request = maintenance_pb2.StatusRequest()
        if endpoint is not None:
            at = self._endpoint(endpoint)
        else:
            at = await self._connection.ready_endpoint(self._connection.timing.request_s)
        answer = await self._connection.once(
            lambda at: at.maintenance.Status, request, at=at, timeout_s=timeout_s
        )
        return _read_status(at.name, answer)

    async def statuses(self, *, timeout_s: float | None = None) -> dict[str, MemberStatus | StrataError]:
        """Return the status of every endpoint; for an endpoint that fails, its error."""
        names = sorted(endpoint.name for endpoint in self._connection.endpoints)
        # concurrently: each endpoint that does not answer takes the whole time limit
        found = await asyncio.gather(*(self._status_or_why(name, timeout_s) for name in names))
        return dict(zip(names, found, strict=True))

    async def _status_or_why(self, endpoint: str, timeout_s: float | None) -> MemberStatus | StrataError:
        try:
            return await self.status(endpoint, timeout_s=timeout_s)
        except StrataError as error:
            return error

    async def add(self, peer_url: str, *, learner: bool) -> Member:
        """Add a member, to be started next. The call is not repeated, so check the members before a retry."""
        request = cluster_pb2.MemberAddRequest(peerURLs=[peer_url], isLearner=learner)
        answer = await self._connection.once(lambda at: at.cluster.MemberAdd, request, timeout_s=SLOW_S)
        return _member(answer.member)

    async def promote(self, member_id: int) -> None:
        """Make a learner a voting member; `Refused` while it has not caught up."""
        request = cluster_pb2.MemberPromoteRequest(ID=member_id)
        await self._connection.once(lambda at: at.cluster.MemberPromote, request, timeout_s=SLOW_S)

    async def remove(self, member_id: int) -> None:
        """Remove a member; it is not an error if it is already removed."""
        request = cluster_pb2.MemberRemoveRequest(ID=member_id)
        try:
            await self._connection.once(lambda at: at.cluster.MemberRemove, request, timeout_s=SLOW_S)
        except NotFound:
            return

    async def move_leader(self, member_id: int) -> None:
        """Transfer etcd's leadership to a member; the call goes to the leader, which alone can do it."""
        for name, status in (await self.statuses()).items():
            if isinstance(status, MemberStatus) and status.leader_id == status.member_id:
                request = maintenance_pb2.MoveLeaderRequest(targetID=member_id)
                await self._connection.once(
                    lambda at: at.maintenance.MoveLeader, request, timeout_s=SLOW_S, at=self._endpoint(name)
                )
                return
        raise NotFound("none of the etcd endpoints leads")

    async def alarms(self) -> tuple[Alarm, ...]:
        """Return every alarm that is on."""
        request = maintenance_pb2.AlarmRequest(action=maintenance_pb2.AlarmRequest.GET)
        answer = await self._connection.repeated(lambda at: at.maintenance.Alarm, request)
        return tuple(
            Alarm(member_id=alarm.memberID, kind=maintenance_pb2.AlarmType.Name(alarm.alarm))
            for alarm in answer.alarms
        )

    async def disarm(self, alarm: Alarm) -> None:
        """Switch an alarm off, after its cause is removed."""
        request = maintenance_pb2.AlarmRequest(
            action=maintenance_pb2.AlarmRequest.DEACTIVATE,
            memberID=alarm.member_id,
            alarm=maintenance_pb2.AlarmType.Value(alarm.kind),
        )
        await self._connection.repeated(lambda at: at.maintenance.Alarm, request)

    async def defragment(self, endpoint: str, *, timeout_s: float = SLOW_S) -> None:
        """Release the free space of one member's database; that member stalls meanwhile.

        `Unavailable` after `timeout_s`; the member continues nevertheless.
        """
        await self._connection.once(
            lambda at: at.maintenance.Defragment,
            maintenance_pb2.DefragmentRequest(),
            timeout_s=timeout_s,
            at=self._endpoint(endpoint),
        )

    async def hash_kv(self, endpoint: str, revision: int) -> tuple[int, int]:
        """Return (hash, compact revision) of one member's keys up to `revision`.

        Members whose compact revisions are equal must have equal hashes.
        """
        answer = await self._connection.once(
            lambda at: at.maintenance.HashKV,
            maintenance_pb2.HashKVRequest(revision=revision),
            timeout_s=SLOW_S,
            at=self._endpoint(endpoint),
        )
        return answer.hash, answer.compact_revision

    def snapshot(self, endpoint: str, *, idle_s: float = IDLE_S) -> AsyncGenerator[bytes, None]:
        """Yield the database of one member, and its SHA-256 as the last 32 bytes (`etcd.snapshot`)."""
        return stream(self._connection, self._endpoint(endpoint), idle_s=idle_s)

    def _endpoint(self, name: str) -> Endpoint:
        return self._connection.named(name)


def _member(member: cluster_pb2.Member) -> Member:
    return Member(
        id=member.ID,
        name=member.name,
        peer_urls=tuple(member.peerURLs),
        client_urls=tuple(member.clientURLs),
        learner=member.isLearner,
    )


def _read_status(endpoint: str, answer: maintenance_pb2.StatusResponse) -> MemberStatus:
    return MemberStatus(
        endpoint=endpoint,
        cluster_id=answer.header.cluster_id,
        member_id=answer.header.member_id,
        version=answer.version,
        leader_id=answer.leader,
        raft_term=answer.raftTerm,
        raft_index=answer.raftIndex,
        revision=answer.header.revision,
        db_bytes=answer.dbSize,
        db_bytes_in_use=answer.dbSizeInUse,
        learner=answer.isLearner,
        errors=tuple(answer.errors),
    )
