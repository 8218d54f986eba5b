"""A watch through real replicas resumes at another replica when its replica dies."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from strata.devcluster.etcd_cluster import EtcdCluster
from strata.errors import Unavailable
from strata.v1.common_pb2 import Token
from strata.v1.watch_pb2 import WatchRequest
from strata.v1.watch_pb2_grpc import WatchStub
from strata.wire.status import translated
from tests.integration.replicas import LIMIT_S, OPTIONS, started

ROUNDS = 60


@pytest.mark.journey
async def test_a_watch_misses_no_event_when_its_replica_is_killed(etcd: EtcdCluster, tmp_path: Path) -> None:
    async with started(etcd, "watch-kill", tmp_path) as replicas:
        members = await replicas.world("r2", "r3")
        seen: list[int] = []
        rounds: list[str] = []
        token = Token()
        watching = asyncio.Event()

        async def watch() -> None:
            for name in itertools.cycle(("r1", "r2")):
                async with grpc.aio.insecure_channel(replicas[name].address, options=OPTIONS) as channel:
                    stub: Any = WatchStub(channel)
                    try:
                        with translated(name):
                            call = stub.Watch(WatchRequest(job="job", prefix="barriers/", token=token))
                            async for response in call:
                                watching.set()
                                for event in response.events:
                                    seen.append(event.mod_revision)
                                    if event.key.endswith("outcome") and not event.deleted:
                                        rounds.append(event.key)
                                if response.HasField("token"):
                                    token.CopyFrom(response.token)
                    except Unavailable:
                        continue

        watcher = asyncio.create_task(watch())
        async with asyncio.timeout(LIMIT_S):
            await watching.wait()
            for round_ in range(1, ROUNDS + 1):
                for rank, member in enumerate(members):
                    member.arrive([rank], round_)
                for member in members:
                    await member.outcome(round_)
                if round_ == ROUNDS // 2:
                    replicas["r1"].kill()
            while len(rounds) < ROUNDS:  # noqa: ASYNC110  # the other task appends rounds
                await asyncio.sleep(0.02)
        watcher.cancel()
        assert [key.split("/")[3] for key in rounds] == [f"{n:012d}" for n in range(1, ROUNDS + 1)]
        assert seen == sorted(seen)
