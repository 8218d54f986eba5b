"""Admin: the cluster as the replica that answers sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from strata.coordinator.calls.pages import ANSWER_BYTES
from strata.coordinator.context import EtcdMember, ReplicaContext
from strata.coordinator.observed import UNHEARD
from strata.coordinator.permission import check
from strata.coordinator.servicers.answering import Desk, answered
from strata.core import records
from strata.core.authority import Identity, refusal
from strata.core.ids import InstanceId
from strata.core.job import job_names
from strata.core.leadership import leader_of
from strata.core.view import Entry
from strata.errors import QuotaExceeded, Unavailable
from strata.v1 import admin_pb2, admin_pb2_grpc
from strata.wire.tokens import token

RESOURCE_BYTES: Final = ANSWER_BYTES - 64
"""Leaves room for what is around it in a message."""


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """`peer_ready` tells whether a peer said within the last second that it is ready."""

    def __init__(
        self,
        context: ReplicaContext,
        desk: Desk,
        *,
        peer_ready: Callable[[InstanceId], bool],
        sessions: Callable[[], int],
    ) -> None:
        self._context = context
        self._desk = desk
        self._peer_ready = peer_ready
        self._sessions = sessions

    async def GetStatus(  # noqa: N802  # the name is the RPC's
        self,
        _request: admin_pb2.GetStatusRequest,
        call: Any,
    ) -> admin_pb2.GetStatusResponse:
        response: admin_pb2.GetStatusResponse = await answered(self._desk, "get_status", call, self._status)
        return response

    async def GetResource(  # noqa: N802  # the name is the RPC's
        self, request: admin_pb2.GetResourceRequest, call: Any
    ) -> admin_pb2.GetResourceResponse:
        async def read(identity: Identity | None) -> admin_pb2.GetResourceResponse:
            resource = self._context.soft.resource
            if resource is None:
                raise Unavailable("this replica shows nothing", hint="ask another one")
            json = await resource(request.path, identity)
            if len(json) > RESOURCE_BYTES:
                raise QuotaExceeded(
                    f"{request.path[:200]} has {len(json)} bytes, and an answer at most {RESOURCE_BYTES}",
                    hint="ask for it over HTTP, or for a page or a shorter time",
                )
            mirror = self._context.mirror
            return admin_pb2.GetResourceResponse(json=json, token=token(mirror.uid, mirror.view.revision))

        response: admin_pb2.GetResourceResponse = await answered(self._desk, "get_resource", call, read)
        return response

    async def _status(self, identity: Identity | None) -> admin_pb2.GetStatusResponse:
        context, view = self._context, self._context.mirror.view
        check(refusal(identity, "Admin.GetStatus", cluster=context.keys.cluster))
        etcd = await context.etcd_members()
        leader = leader_of(view, context.keys)
        instance = leader.record.instance if leader is not None else ""
        replicas = view.entries(context.keys.replicas, records.Replica)
        return admin_pb2.GetStatusResponse(
            cluster=context.keys.cluster,
            leader=leader.record.replica if leader is not None else "",
            leader_epoch=leader.create_revision if leader is not None else 0,
            replicas=[self._replica(entry, leader=entry.record.instance == instance) for entry in replicas],
            etcd=[_member(member) for member in etcd],
            jobs=len(job_names(view, context.keys)),
            sessions=self._sessions(),
            answered_by=context.replica,
            token=token(context.mirror.uid, view.revision),
            outage=context.outage(),
        )

    def _replica(self, entry: Entry[records.Replica], *, leader: bool) -> admin_pb2.ReplicaStatus:
        record = entry.record
        if record.instance == self._context.instance:
            ready, reason = self._context.is_ready()
        else:
            ready = self._peer_ready(record.instance)
            reason = "" if ready else UNHEARD
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
