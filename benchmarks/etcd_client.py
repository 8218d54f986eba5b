"""Our etcd client compared with a bare gRPC stub: 64 writers, each with one guarded transaction after another.

    python -m benchmarks.etcd_client [--json FILE] [--members 3] [--fsync] [--rounds 21]

Both sides send the same transaction (one compare, one put of 64 bytes) over one connection to a local etcd, and
alternate. The figure is the median over the rounds of ours ÷ bare, and its spread. etcd is fastest without fsync and
with one member, so the client's share of the time is then largest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import uvloop

from strata.core.kv.txn import Compare, Op, Put, Target, Txn
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.etcd import EtcdStore, Timing
from strata.etcdapi import kv_pb2
from strata.etcdapi.kv_pb2_grpc import KVStub

WRITERS = 64
VALUE = b"v" * 64
GOAL = 0.8
DEADLINE_S = 10.0
"""Deadline of both sides: a machine busy with other work should lower the figure, not end the run."""

Write = Callable[[str], Awaitable[bool]]
TxnCall = grpc.aio.UnaryUnaryMultiCallable[kv_pb2.TxnRequest, kv_pb2.TxnResponse]


def bare(call: TxnCall) -> Write:
    """Return a write by the bare stub, with the same deadline."""

    async def write(key: str) -> bool:
        name = key.encode()
        answer = await call(
            kv_pb2.TxnRequest(
                compare=[
                    kv_pb2.Compare(
                        target=kv_pb2.Compare.VERSION, result=kv_pb2.Compare.LESS, key=name, version=1 << 40
                    )
                ],
                success=[kv_pb2.RequestOp(request_put=kv_pb2.PutRequest(key=name, value=VALUE))],
            ),
            timeout=DEADLINE_S,
        )
        return answer.succeeded

    return write


def ours(store: EtcdStore) -> Write:
    async def write(key: str) -> bool:
        below = Compare(key=key, target=Target.VERSION, op=Op.LESS, operand=1 << 40)
        result = await store.execute(Txn(compares=(below,), success=(Put(key=key, value=VALUE),)))
        return result.succeeded

    return write


async def rate(write: Write, seconds: float) -> float:
    """Return the writes per second of all writers together."""
    end = time.perf_counter() + seconds
    counts = [0] * WRITERS

    async def writer(number: int) -> None:
        key = f"/bench/{number}"
        while time.perf_counter() < end:
            assert await write(key)
            counts[number] += 1

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(WRITERS):
            group.create_task(writer(number))
    return sum(counts) / (time.perf_counter() - began)


async def measure(endpoints: tuple[str, ...], rounds: int, seconds: float) -> list[tuple[float, float]]:
    """Return (ours, bare) of every round, after one round of warming up."""
    async with (
        await EtcdStore.connect(endpoints[:1], timing=Timing(request_s=DEADLINE_S)) as store,
        grpc.aio.insecure_channel(endpoints[0].removeprefix("http://")) as channel,
    ):
        sides = (ours(store), bare(KVStub(channel).Txn))
        found: list[tuple[float, float]] = []
        for number in range(rounds + 1):
            order = sides if number % 2 else sides[::-1]
            first, second = [await rate(side, seconds) for side in order]
            found.append((first, second) if number % 2 else (second, first))
        return found[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--members", type=int, default=1, choices=(1, 3))
    parser.add_argument("--fsync", action="store_true")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = EtcdCluster.start(Path(folder), members=args.members, fsync=args.fsync)
        try:
            rounds = uvloop.run(measure(cluster.endpoints, max(5, args.rounds), args.seconds))
        finally:
            cluster.kill()
    ratios = sorted(mine / theirs for mine, theirs in rounds)
    result = {
        "benchmark": "etcd_client",
        "writers": WRITERS,
        "members": args.members,
        "fsync": args.fsync,
        "ours_per_s": round(statistics.median(mine for mine, _ in rounds)),
        "bare_per_s": round(statistics.median(theirs for _, theirs in rounds)),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "rounds": len(rounds),
        "goal": GOAL,
        "met": statistics.median(ratios) >= GOAL,
        "versions": {"python": platform.python_version(), "grpc": grpc.__version__},
    }
    print(
        f"{WRITERS} writers, {args.members} member(s): ours {result['ours_per_s']}/s, "
        f"bare stub {result['bare_per_s']}/s, ratio {result['ratio']} "
        f"(spread {ratios[0]:.3f} to {ratios[-1]:.3f}, goal {GOAL})"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
