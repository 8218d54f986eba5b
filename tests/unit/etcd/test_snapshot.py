"""The stream of a snapshot: its pieces, a stream without data, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from strata.core.kv.txn import Range
from strata.errors import ConfigError, NotFound, Refused, Unavailable
from strata.etcd import EtcdStore
from tests.unit.etcd.fake_etcd import FakeEtcd, soon, store_on

PIECES = [b"a" * 32_768, b"b" * 100, b"", b"c" * 32]


@pytest.fixture
async def one() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as fake:
        yield fake


@pytest.fixture
async def other() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as fake:
        yield fake


async def whole(_context: Any) -> AsyncIterator[bytes]:
    for piece in PIECES:
        yield piece


async def taken(store: EtcdStore, member: FakeEtcd, *, idle_s: float = 10.0) -> list[bytes]:
    return [piece async for piece in store.cluster.snapshot(member.address, idle_s=idle_s)]


async def test_the_pieces_come_from_the_member_that_was_named(one: FakeEtcd, other: FakeEtcd) -> None:
    one.snapshot = other.snapshot = whole
    async with store_on(one, other) as store:
        assert await soon(taken(store, other)) == PIECES
        assert (one.count("Snapshot"), other.count("Snapshot")) == (0, 1)
        with pytest.raises(NotFound, match="elsewhere:1"):
            store.cluster.snapshot("elsewhere:1")


async def test_a_read_at_a_member_contacts_no_other_member(one: FakeEtcd, other: FakeEtcd) -> None:
    other.revision = 7
    async with store_on(one, other) as store:
        assert (await store.read_at(other.address, Range(key="k"))).revision == 7
        assert (one.count("Range"), other.count("Range")) == (0, 1)


async def test_silence_is_an_error_and_ends_the_call(one: FakeEtcd) -> None:
    ended = asyncio.Event()

    async def stuck(_context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    one.snapshot = stuck
    async with store_on(one) as store:
        with pytest.raises(Unavailable, match=r"sent nothing of its snapshot for 0\.05 s"):
            await soon(taken(store, one, idle_s=0.05))
        await soon(ended.wait())  # cancelling the call ends the member's read transaction


@pytest.mark.parametrize("begun", [False, True])
async def test_a_stream_that_breaks_is_unavailable(one: FakeEtcd, begun: bool) -> None:
    async def broken(context: Any) -> AsyncIterator[bytes]:
        if begun:
            yield b"first"
        await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    one.snapshot = broken
    async with store_on(one) as store:
        with pytest.raises(Unavailable, match="going down"):
            await soon(taken(store, one))


async def test_a_user_without_the_role_is_refused(one: FakeEtcd) -> None:
    async def refused(context: Any) -> AsyncIterator[bytes]:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
        yield b""

    one.snapshot = refused
    async with store_on(one) as store:
        with pytest.raises(Refused, match="permission denied"):
            await soon(taken(store, one))


@pytest.mark.parametrize("helps", [True, False])
async def test_a_stale_token_is_renewed_once(one: FakeEtcd, helps: bool) -> None:
    async def with_the_second_token(context: Any) -> AsyncIterator[bytes]:
        if not helps or dict(context.invocation_metadata())["token"] == "token-1":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token")
        for piece in PIECES:
            yield piece

    one.snapshot = with_the_second_token
    async with store_on(one, user="u") as store:
        if helps:
            assert await soon(taken(store, one)) == PIECES
        else:
            with pytest.raises(ConfigError, match="invalid auth token"):
                await soon(taken(store, one))
        assert (one.count("Authenticate"), one.count("Snapshot")) == (2, 2)


async def test_closing_the_stream_early_ends_the_call(one: FakeEtcd) -> None:
    ended = asyncio.Event()

    async def endless(_context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 1024
        finally:
            ended.set()

    one.snapshot = endless
    async with store_on(one) as store:
        async with contextlib.aclosing(store.cluster.snapshot(one.address)) as pieces:
            async for _piece in pieces:
                break
        await soon(ended.wait())
