"""Connecting to a cluster: wait for a first answer, and authenticate."""

from __future__ import annotations

from collections.abc import Callable

from grpc.aio import AioRpcError

from strata.errors import StrataError, Unavailable
from strata.etcd import errors
from strata.etcd.connection import Connection
from strata.etcd.endpoint import Endpoint
from strata.etcd.login import Credentials, Login
from strata.etcdapi import auth_pb2, cluster_pb2


def authenticator(connection: Callable[[], Connection], who: Credentials) -> Login:
    """Return a login that authenticates `who` over a connection that may not exist yet."""
    request = auth_pb2.AuthenticateRequest(name=who.user, password=who.password)

    async def authenticate() -> str:
        try:
            answer = await connection().repeated(lambda at: at.auth.Authenticate, request, anonymous=True)
        except StrataError as error:
            if "authentication is not enabled" in error.message:
                return ""
            raise
        return answer.token

    return Login(authenticate)


async def first_answer(connection: Connection) -> Endpoint:
    """Return the endpoint that answers first; if none answers, raise an error with the reason of each.

    The request used for this is allowed to every user and needs no leader.
    """
    timing = connection.timing
    deadline = timing.now() + timing.connect_s
    request = cluster_pb2.MemberListRequest(linearizable=False)
    while True:
        try:
            endpoint = await connection.ready_endpoint(max(0.01, deadline - timing.now()))
        except Unavailable as error:
            raise await _why_none(connection) from error
        try:
            await connection.once(lambda at: at.cluster.MemberList, request, at=endpoint)
        except Unavailable as error:
            if timing.now() >= deadline:
                if wrong := errors.not_etcd(error):
                    raise wrong from error
                raise
        else:
            return endpoint
        await timing.sleep(timing.pause_s(2))


async def _why_none(connection: Connection) -> StrataError:
    """Call every endpoint once, only to learn its error: a channel's state has no error text."""
    reasons: list[str] = []
    request = cluster_pb2.MemberListRequest(linearizable=False)
    for endpoint in connection.endpoints:
        try:
            await endpoint.cluster.MemberList(request, timeout=connection.timing.request_s)
        except AioRpcError as error:
            meaning = errors.translate(error, endpoint.name)
            reasons.append(meaning.message)
            if isinstance(meaning, Unavailable) and (wrong := errors.handshake_failure(meaning)):
                return wrong
    return Unavailable(f"no etcd endpoint answers: {'; '.join(reasons) or 'the answers came too late'}")
