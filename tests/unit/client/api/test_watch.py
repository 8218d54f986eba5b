"""A relayed watch continues while endpoints refuse it or are down."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from strata import errors
from strata.client.api import watch
from strata.session.endpoints import Endpoint, parse_endpoints
from strata.testing.virtual_time import in_virtual_time
from strata.transport.channel import Connection
from strata.v1.common_pb2 import Token
from strata.v1.watch_pb2 import WatchResponse

SERVED = WatchResponse(token=Token(uid="uid-1", revision=7))


class Endpoints:
    """Endpoints by name: each serves a watch once, or fails it with an error."""

    def __init__(self, **answers: errors.StrataError | None) -> None:
        self.answers = answers
        self.requests: list[str] = []

    @asynccontextmanager
    async def connected(self, endpoint: Endpoint, **_: Any) -> AsyncIterator[Connection]:
        yield Connection(channel=endpoint, metadata=())  # type: ignore[arg-type]  # `Watch` uses nothing else of it

    def stub(self, endpoint: Endpoint) -> Any:
        self.at = endpoint.host
        return self

    async def Watch(self, _request: object, **_: Any) -> AsyncIterator[WatchResponse]:  # noqa: N802  # gRPC's name
        self.requests.append(self.at)
        error = self.answers[self.at]
        if error is not None:
            raise error
        yield SERVED

    def watch(self, patch: pytest.MonkeyPatch) -> Any:
        patch.setattr(watch, "connected", self.connected)
        patch.setattr(watch, "WatchStub", self.stub)
        return watch.watch(parse_endpoints(list(self.answers)), random.Random(1), job="j", timeout_s=60.0)


@in_virtual_time()
async def test_an_endpoint_that_refuses_ends_no_watch_while_the_others_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = Endpoints(x=None, y=None, z=None)
    following = there.watch(monkeypatch)
    assert await anext(following) == SERVED
    there.answers = {
        "x": errors.Unauthenticated("an older list of tokens"),
        "y": errors.Unavailable("it starts"),
        "z": errors.Unavailable("it starts"),
    }
    ask = there.Watch

    def counted(*args: Any, **more: Any) -> Any:
        if there.requests.count("x") > 6:  # more refusals than there are endpoints
            there.answers["y"] = None
        return ask(*args, **more)

    monkeypatch.setattr(there, "Watch", counted)
    assert await anext(following) == SERVED


@in_virtual_time()
@pytest.mark.parametrize("count", [1, 3])
async def test_a_watch_ends_after_one_refusal_more_in_a_row_than_there_are_endpoints(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "xyz"[:count]
    there = Endpoints(**dict.fromkeys(names))
    following = there.watch(monkeypatch)
    assert await anext(following) == SERVED
    there.requests.clear()
    there.answers = dict.fromkeys(names, errors.Unauthenticated("revoked"))
    with pytest.raises(errors.Unauthenticated, match="revoked"):
        await anext(following)
    assert len(there.requests) == count + 1
