"""Open streams end with the credential that admitted them; a newer credential of the same identity reopens them."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from structlog.testing import capture_logs

from strata.client.api.watch import watch
from strata.config import CoordinatorConfig, Credentials
from strata.coordinator.access import admission
from strata.core.access.authority import Role
from strata.errors import Unauthenticated
from strata.security.certificates import Authority
from strata.security.private import write_private
from strata.security.tokens import AcceptedTokens, TokenFile
from strata.session.endpoints import parse_endpoints
from strata.v1.admin_pb2 import GetStatusRequest
from strata.v1.admin_pb2_grpc import AdminStub
from strata.v1.watch_pb2 import WatchRequest
from strata.v1.watch_pb2_grpc import WatchStub
from strata.wire.status import from_rpc
from strata.wire.tls import shown
from tests.secured_fixtures import NOW, issued
from tests.unit.coordinator.grpc_rig import LIMIT_S, Served, served

REVIEW_S = 0.2


async def ended(member: Any) -> Unauthenticated:
    """Return the error that ends the session of a member within the limit."""
    async with asyncio.timeout(LIMIT_S):
        await member.over.wait()
    assert isinstance(member.error, Unauthenticated), member.error
    return member.error


async def watching(server: Served, credentials: Credentials, last_seen: asyncio.Queue[Any]) -> None:
    """Watch until the stream ends; put each message, and then the error, into `heard`."""
    async with server.channel(credentials) as channel:
        stream: Any = WatchStub(channel).Watch(WatchRequest(job="job"), metadata=shown(credentials))
        try:
            async for message in stream:
                last_seen.put_nowait(message)
        except grpc.aio.AioRpcError as error:
            last_seen.put_nowait(from_rpc(error, server.address))


async def next_error(last_seen: asyncio.Queue[Any]) -> Exception:
    async with asyncio.timeout(LIMIT_S):
        while not isinstance(found := await last_seen.get(), Exception):
            pass
        return found


# -- tokens


@dataclass(slots=True)
class Tokens:
    """A replica that accepts tokens, and its token file."""

    server: Served
    file: TokenFile
    folder: Path

    def add(self, role: Role, id: str, **more: Any) -> Credentials:  # noqa: A002
        entry, text = self.file.add(role=role, id=id, **{"now": dt.datetime.now(dt.UTC), **more})
        path = self.folder / f"{entry.name}.token"
        write_private(path, text.encode())
        return Credentials(token_file=path)

    def revoke(self, credentials: Credentials) -> None:
        assert credentials.token_file is not None
        self.file.revoke(credentials.token_file.stem)


@pytest.fixture
async def tokens(tmp_path: Path) -> AsyncIterator[Tokens]:
    file = TokenFile(tmp_path / "accepted.json")
    _entry, own = file.add(role=Role.COORDINATOR, id="r1", now=NOW)
    write_private(tmp_path / "own", own.encode())
    config = CoordinatorConfig(
        listen="127.0.0.1:0",
        accepted_tokens_file=file.path,
        credentials=Credentials(token_file=tmp_path / "own"),
        review_s=REVIEW_S,
    )
    async with served(config) as server:
        yield Tokens(server, file, tmp_path)


async def test_a_revoked_token_ends_its_session_and_its_watch_and_no_other(tokens: Tokens) -> None:
    server, received, other = tokens.server, asyncio.Queue[Any](), asyncio.Queue[Any]()
    good, bad = tokens.add(Role.MEMBER, "w0"), tokens.add(Role.MEMBER, "w1")
    stays, goes = tokens.add(Role.VIEWER, "v0"), tokens.add(Role.VIEWER, "v1")
    async with asyncio.TaskGroup() as tasks:
        watches = [
            tasks.create_task(watching(server, goes, received)),
            tasks.create_task(watching(server, stays, other)),
        ]
        members = [server.member("w0", good, tasks), server.member("w1", bad, tasks)]
        for member in members:
            await member.connect("")
        await received.get()
        with capture_logs() as logs:
            tokens.revoke(bad)
            tokens.revoke(goes)
            error = await ended(members[1])
            # a watch ends at its next message
            server.put(server.context.keys.job("job").root + "x/1", b"{}")
            watch_error = await next_error(received)
        assert isinstance(watch_error, Unauthenticated)
        for each in (error, watch_error):
            assert "admitted earlier, and no longer: this cluster does not accept the token" in each.message
            assert "strata tokens add" in each.hint
        logged = [(line["kind"], line["identity"]) for line in logs if line["event"] == "stream_revoked"]
        assert sorted(logged) == [("sessions", "member w1"), ("watches", "viewer v1")]
        revoked = server.context.measures.revoked
        assert (revoked.child("sessions").value, revoked.child("watches").value) == (1, 1)
        await asyncio.sleep(3 * REVIEW_S)  # for so long nothing happens to the other streams
        assert not members[0].over.is_set()
        assert not watches[1].done()
        members[0].drop()
        watches[1].cancel()


async def test_a_token_that_expires_ends_its_session(tokens: Tokens) -> None:
    now = dt.datetime.now(dt.UTC)
    short = tokens.add(Role.MEMBER, "w0", now=now - dt.timedelta(hours=24), days=1 + 2 / 86_400)
    async with asyncio.TaskGroup() as tasks:
        member = await tokens.server.member("w0", short, tasks).connect("")
        assert "expired on" in (await ended(member)).message
        assert dt.datetime.now(dt.UTC) - now < dt.timedelta(seconds=2 + LIMIT_S)


async def test_a_token_that_is_replaced_costs_a_member_a_reconnect_and_no_generation(tokens: Tokens) -> None:
    old = tokens.add(Role.MEMBER, "w0")
    async with asyncio.TaskGroup() as tasks:
        member = await tokens.server.member("w0", old, tasks).connect("")
        generation, incarnation = (await member.world()).world.generation, member.incarnation
        new = tokens.add(Role.MEMBER, "w0")
        await asyncio.sleep(3 * REVIEW_S)
        assert not member.over.is_set(), "both count, and nothing happens"
        assert old.token_file is not None
        assert new.token_file is not None
        # from now on the member reads the new token for its next connection
        new.token_file.replace(old.token_file)
        TokenFile(tokens.file.path).revoke(old.token_file.stem)
        await ended(member)
        await member.connect("", incarnation=incarnation)
        world = await member.world()
        assert (member.incarnation, world.world.generation) == (incarnation, generation)
        member.drop()


async def test_a_client_watch_outlives_its_token_and_ends_without_another(
    tokens: Tokens,
) -> None:
    """As in docs/security.md: a second token is added, the file replaced, and the first token revoked."""
    server, received = tokens.server, asyncio.Queue[Any]()
    old = tokens.add(Role.VIEWER, "v")

    async def follow() -> None:
        messages = watch(
            parse_endpoints(server.address, old),
            random.Random(1),
            job="job",
            timeout_s=LIMIT_S,
            credentials=old,
        )
        async for message in messages:
            received.put_nowait(message)

    async def put(name: str) -> None:
        server.put(server.context.keys.job("job").root + name, b"{}")
        async with asyncio.timeout(LIMIT_S):
            while not any(event.key == name for event in (await received.get()).events):
                pass

    following = asyncio.create_task(follow())
    await put("x/1")
    new = tokens.add(Role.VIEWER, "v")
    assert old.token_file is not None
    assert new.token_file is not None
    new.token_file.replace(old.token_file)
    TokenFile(tokens.file.path).revoke(old.token_file.stem)
    revoked = server.context.measures.revoked.child("watches")
    async with asyncio.timeout(LIMIT_S):
        while not revoked.value:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.05)
    await put("x/2")  # the stream ends at this message
    await put("x/3")
    TokenFile(tokens.file.path).revoke(new.token_file.stem)
    async with asyncio.timeout(LIMIT_S):
        while revoked.value < 2:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.05)
    server.put(server.context.keys.job("job").root + "x/4", b"{}")
    with pytest.raises(Unauthenticated, match="this cluster does not accept the token"):
        async with asyncio.timeout(LIMIT_S):
            await following


async def test_an_unreadable_token_file_ends_no_stream(tokens: Tokens) -> None:
    async with asyncio.TaskGroup() as tasks:
        member = await tokens.server.member("w0", tokens.add(Role.MEMBER, "w0"), tasks).connect("")
        body = tokens.file.path.read_bytes()
        with capture_logs() as logs:
            write_private(tokens.file.path, body[: len(body) // 2])
            await asyncio.sleep(3 * REVIEW_S)
        assert any(line["event"] == "open_streams_not_reviewed" for line in logs)
        assert not member.over.is_set()
        write_private(tokens.file.path, b'{"v": 1, "tokens": []}')
        await ended(member)


async def test_a_token_file_that_becomes_unreadable_during_a_review_ends_no_stream(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A review that pauses judges every stream by the tokens it read at its start."""
    monkeypatch.setattr(admission, "REVIEW_AT_ONCE", 1)
    read = AcceptedTokens.reload

    def reload(accepted: AcceptedTokens) -> None:
        read(accepted)
        tokens.file.path.chmod(0o644)  # unreadable by the next reload
        tokens.file.path.touch()

    async with asyncio.TaskGroup() as tasks:
        members = [
            await tokens.server.member(name, tokens.add(Role.MEMBER, name), tasks).connect("")
            for name in ("w0", "w1")
        ]
        monkeypatch.setattr(AcceptedTokens, "reload", reload)
        with capture_logs() as logs:
            await asyncio.sleep(4 * REVIEW_S)
        assert any(line["event"] == "open_streams_not_reviewed" for line in logs)
        assert not any(member.over.is_set() for member in members)
        monkeypatch.undo()
        for member in members:
            member.drop()


# -- certificates


async def test_a_connection_with_an_expired_certificate_is_closed_after_a_refused_call(
    tmp_path: Path,
) -> None:
    """Otherwise a client that reads its files only for a new connection would be refused forever."""
    now = dt.datetime.now(dt.UTC)
    authority = Authority.create(tmp_path / "ca", cluster="default", now=NOW)
    own = issued(authority, tmp_path / "r1", Role.COORDINATOR, "r1", hosts=("127.0.0.1",))
    dated = {"now": now - dt.timedelta(hours=24), "days": 1 + 2 / 86_400}
    async with served(CoordinatorConfig(listen="127.0.0.1:0", credentials=own)) as server:
        short = issued(authority, tmp_path / "w0", Role.MEMBER, "w0", **dated)
        long = issued(authority, tmp_path / "w1", Role.MEMBER, "w1")
        async with server.channel(short) as channel, server.channel(long) as other:
            stub: Any = AdminStub(channel)
            other_stub: Any = AdminStub(other)
            await stub.GetStatus(GetStatusRequest())
            await other_stub.GetStatus(GetStatusRequest())
            await asyncio.sleep(2.1)
            assert channel.get_state() is other.get_state() is grpc.ChannelConnectivity.READY
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetStatus(GetStatusRequest())
            assert isinstance(error := from_rpc(refused.value, server.address), Unauthenticated)
            assert "expired on" in error.message
            async with asyncio.timeout(LIMIT_S):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            closed = server.context.connections.closed
            assert closed.child("grpc", "certificate").value == 1
            assert other.get_state() is grpc.ChannelConnectivity.READY


async def test_a_session_ends_when_its_certificate_expires_or_its_authority_is_removed(
    tmp_path: Path,
) -> None:
    now = dt.datetime.now(dt.UTC)
    first = Authority.create(tmp_path / "first", cluster="default", now=NOW)
    second = Authority.create(tmp_path / "second", cluster="default", now=NOW)
    own = issued(first, tmp_path / "r1", Role.COORDINATOR, "r1", hosts=("127.0.0.1",))
    assert own.ca_file is not None
    ca_pem, other_pem = own.ca_file.read_bytes(), (tmp_path / "second" / "ca.pem").read_bytes()
    own.ca_file.write_bytes(ca_pem + other_pem)
    config = CoordinatorConfig(listen="127.0.0.1:0", credentials=own, review_s=REVIEW_S)
    async with served(config) as server, asyncio.TaskGroup() as tasks:
        made = {
            "short": issued(
                first,
                tmp_path / "w0",
                Role.MEMBER,
                "w0",
                now=now - dt.timedelta(hours=24),
                days=1 + 2 / 86_400,
            ),
            "first": issued(first, tmp_path / "w1", Role.MEMBER, "w1"),
            "second": issued(second, tmp_path / "w2", Role.MEMBER, "w2"),
        }
        members = {}
        for number, (name, credentials) in enumerate(made.items()):
            # the server's own certificate is signed by the first authority
            trusting = replace(credentials, ca_file=tmp_path / "first" / "ca.pem")
            members[name] = await server.member(f"w{number}", trusting, tasks).connect("")
        assert "expired on" in (await ended(members["short"])).message
        assert not members["first"].over.is_set()
        assert not members["second"].over.is_set()
        replaced = own.ca_file.with_name("new.pem")
        replaced.write_bytes(ca_pem)
        replaced.replace(own.ca_file)
        error = await ended(members["second"])
        assert "of an authority that this cluster does not accept any more" in error.message
        await asyncio.sleep(3 * REVIEW_S)
        assert not members["first"].over.is_set()
        members["first"].drop()
