"""The calls of `Admin`: the cluster as the answering replica sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from strata.coordinator.calls.pages import ANSWER_BYTES
from strata.coordinator.calls.table import Row
from strata.coordinator.context import ReadResource, ReplicaContext
from strata.coordinator.etcd.members import EtcdMember
from strata.coordinator.peers.registry import NOT_RECEIVED
from strata.core.access.authority import Identity
from strata.core.ids import InstanceId, checked_id
from strata.core.job import job_names
from strata.core.kv import records
from strata.core.kv.txn import Decision
from strata.core.kv.view import Entry, View
from strata.core.leadership.coordinators import Coordinator, decide_forget, is_known, unreachable
from strata.core.leadership.leader import leader_of
from strata.errors import PermissionDenied, QuotaExceeded, Unavailable
from strata.observe import get_logger, words
from strata.v1 import admin_pb2

log = get_logger()

RESOURCE_BYTES: Final = ANSWER_BYTES - 64
"""Leaves space for the other fields of the message."""


class AdminCalls:
    """Answers the methods of `Admin`.

    `peer_ready` returns whether a peer reported within the last second that it is ready. `read` returns a resource
    of the HTTP API; it is None if this replica serves none.
    """

    def __init__(
        self,
        context: ReplicaContext,
        read: ReadResource | None,
        *,
        peer_ready: Callable[[InstanceId], bool],
        sessions: Callable[[], int],
    ) -> None:
        self._context = context
        self._read = read
        self._peer_ready = peer_ready
        self._sessions = sessions

    def rows(self) -> Iterator[Row]:
        yield Row(method="Admin.GetStatus", answer=self.get_status, waits=False)
        yield Row(method="Admin.ForgetCoordinator", answer=self.forget_coordinator)
        yield Row(method="Admin.GetResource", answer=self.get_resource, waits=False)

    async def get_resource(
        self, request: admin_pb2.GetResourceRequest, identity: Identity | None
    ) -> admin_pb2.GetResourceResponse:
        if self._read is None:
            raise Unavailable("this replica serves no resources", hint="try another replica")
        json = await self._read(request.path, identity)
        if len(json) > RESOURCE_BYTES:
            raise QuotaExceeded(
                f"{request.path[:200]} has {len(json)} bytes, and an answer at most {RESOURCE_BYTES}",
                hint="request it over HTTP, or request a page or a shorter time",
            )
        return admin_pb2.GetResourceResponse(json=json)

    async def get_status(
        self, _request: admin_pb2.GetStatusRequest, _identity: Identity | None
    ) -> admin_pb2.GetStatusResponse:
        context, view = self._context, self._context.mirror.view
        leader = leader_of(view, context.keys)
        instance = leader.record.instance if leader is not None else ""
        replicas = view.entries(context.keys.replicas, records.Replica)
        return admin_pb2.GetStatusResponse(
            cluster=context.keys.cluster,
            leader=leader.record.replica if leader is not None else "",
            leader_epoch=leader.create_revision if leader is not None else 0,
            replicas=sorted(
                [
                    *(self._replica(entry, leader=entry.record.instance == instance) for entry in replicas),
                    *(
                        self._unreachable_status(name, record)
                        for name, record in unreachable(view, context.keys).items()
                    ),
                ],
                key=lambda each: each.replica,
            ),
            etcd=[_member(member) for member in context.etcd_members()],
            jobs=len(job_names(view, context.keys)),
            sessions=self._sessions(),
            answered_by=context.replica,
            outage=context.outage(),
        )

    async def forget_coordinator(
        self, request: admin_pb2.ForgetCoordinatorRequest, identity: Identity | None
    ) -> admin_pb2.ForgetCoordinatorResponse:
        if identity is not None and identity.jobs:
            raise PermissionDenied(
                f"{identity} is limited to jobs, and coordinators belong to none",
                hint="ask an operator of the whole cluster",
            )
        keys, name, known = self._context.keys, checked_id("replica", request.replica), False

        def decide(view: View) -> Decision:
            nonlocal known
            known = known or is_known(view, keys, name)
            return decide_forget(view, keys, name, known=known)

        await self._context.executor.settle(decide)
        log.info("coordinator_forgotten", coordinator=name)
        return admin_pb2.ForgetCoordinatorResponse()

    def _unreachable_status(self, name: str, record: Coordinator) -> admin_pb2.ReplicaStatus:
        since_unix_ms = record.unreachable_since_unix_ms
        return admin_pb2.ReplicaStatus(
            replica=name,
            address=record.address,
            not_ready_reason=words.unreachable(since_unix_ms, self._context.unix_now()),
            unreachable=True,
            unreachable_since_unix_ms=since_unix_ms,
        )

    def _replica(self, entry: Entry[records.Replica], *, leader: bool) -> admin_pb2.ReplicaStatus:
        record = entry.record
        if record.instance == self._context.instance:
            ready, reason = self._context.is_ready()
        else:
            ready = self._peer_ready(record.instance)
            reason = "" if ready else NOT_RECEIVED
        return admin_pb2.ReplicaStatus(
            replica=entry.name,
            instance=record.instance,
            address=record.address,
            http_address=record.http_address,
            version=record.version,
            leader=leader,
            ready=ready,
            not_ready_reason=reason,
        )


def _member(member: EtcdMember) -> admin_pb2.EtcdStatus:
    return admin_pb2.EtcdStatus(
        endpoint=member.endpoint,
        version=member.version,
        healthy=member.healthy,
        leader=member.leader,
        db_size_bytes=member.db_size_bytes,
        error=member.error,
    )
