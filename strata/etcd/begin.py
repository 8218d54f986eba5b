"""The first words with a cluster: is anybody there, and who are we to it?"""

from __future__ import annotations

from collections.abc import Callable

from grpc.aio import AioRpcError

from strata.errors import ConfigError, StrataError, Unavailable
from strata.etcd import errors
from strata.etcd.connection import Connection
from strata.etcd.login import Credentials, Login
from strata.etcdapi import auth_pb2, maintenance_pb2


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


async def first_answer(connection: Connection) -> tuple[maintenance_pb2.StatusResponse, str]:
    """Return some member's status and its endpoint, or say of each why it has none."""
    timing = connection.timing
    deadline = timing.now() + timing.connect_s
    while True:
        try:
            endpoint = await connection.ready_endpoint(max(0.01, deadline - timing.now()))
        except Unavailable as error:
            raise await _why_none(connection) from error
        try:
            request = maintenance_pb2.StatusRequest()
            answer = await connection.once(lambda at: at.maintenance.Status, request, at=endpoint)
            return answer, endpoint.name
        except Unavailable:
            if timing.now() >= deadline:
                raise
        await timing.sleep(timing.pause_s(2))


async def _why_none(connection: Connection) -> StrataError:
    """Ask every endpoint once, only to learn how it fails: the channel's state has no words."""
    found: list[StrataError] = []
    for endpoint in connection.endpoints:
        try:
            await endpoint.maintenance.Status(
                maintenance_pb2.StatusRequest(), timeout=connection.timing.request_s
            )
        except AioRpcError as error:
            found.append(errors.translate(error, endpoint.name))
    for meaning in found:
        if isinstance(meaning, ConfigError):
            return meaning
    reasons = "; ".join(meaning.message for meaning in found) or "they came too late"
    return Unavailable(f"no etcd endpoint answers: {reasons}")
