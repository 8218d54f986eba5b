"""Bit flips on a link without TLS can turn answers into errors.

Of these errors only ClusterReplaced may end a serving replica.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from strata.errors import (
    ConfigError,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    Refused,
    StrataError,
    Unavailable,
)
from strata.testing.memory_client import MemoryClient
from strata.testing.virtual_time import in_virtual_time
from tests.unit.coordinator.serving_rig import cluster

MADE_UP = (ConfigError, InvalidArgument, NotFound, QuotaExceeded, Refused, Unavailable)
CALLS = ("read", "execute", "grant", "keep_alive", "revoke")


def corrupt(client: MemoryClient, answer: Callable[[str], StrataError | None]) -> None:
    """Let `answer` replace this client's results: an error that it returns is raised instead."""

    def changed(name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def answered(argument: Any) -> Any:
            found = answer(name)
            if found is None:
                return await call(argument)
            await asyncio.sleep(
                0.001
            )  # an answer takes time, or a loop that retries at once would stop the clock
            raise found

        return answered

    for name in CALLS:
        setattr(client, name, changed(name, getattr(client, name)))


@pytest.mark.parametrize("kind", MADE_UP)
@pytest.mark.parametrize("call", CALLS)
@in_virtual_time()
async def test_occasional_made_up_errors_of_a_call_end_no_replica(kind: type[StrataError], call: str) -> None:
    rng = random.Random(1)
    async with cluster() as c:
        members = await c.world("r1", "r2", "r3")
        node = c["r1"]
        wrong = [True]

        def answer(name: str) -> StrataError | None:
            made_up = wrong[0] and name == call and rng.random() < 0.3
            return kind("unknown method Rangf for service etcdserverpb.KV") if made_up else None

        corrupt(node.client, answer)
        await asyncio.sleep(30)
        wrong[0] = False
        assert node.alive
        await c.ready()
        assert {m.worker for m in members if c.worker(m.worker) is not None} == {"w0", "w1", "w2"}
