"""An attacking viewer that reads nothing: its streams' windows stay closed, and it answers every ping.

    python -m tests.integration.abuse.unread_attacker --port 50051 --token-file v.token --method Datasets/ListDatasets
        --job j --connections 1 --rate 500 --seconds 15

The attacker sends `--rate` calls a second over all its connections, and reopens each connection that ends. Before it
exits it prints its counts as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import struct
import time
from pathlib import Path

from tests.integration.abuse.attacker import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    done,
    frame,
    named,
    polite,
    request,
    settings,
)

TICK_S = 0.02
MOST_STREAMS = 1 << 28
"""Streams of one connection, far below the range of stream ids."""


def job_field(job: str) -> bytes:
    """Return a request whose first field is the job."""
    return b"\x0a" + bytes([len(job)]) + job.encode() if job else b""


async def unread(args: argparse.Namespace, token: bytes) -> None:
    """Send calls on one connection after another, at one connection's share of the rate."""
    path, body = f"/strata.v1.{args.method}".encode(), job_field(args.job)
    block = request(path, named(b"authorization", b"Bearer " + token))
    message = b"\0" + struct.pack(">I", len(body)) + body
    share, begun, made = args.rate / args.connections, time.monotonic(), 0
    while True:
        try:
            reader, writer = await asyncio.open_connection(args.host, args.port)
        except OSError:
            done["refused"] += 1
            await asyncio.sleep(TICK_S)
            continue
        done["connections"] += 1
        writer.write(PREFACE + settings(initial_window_size=0))
        answering = asyncio.create_task(polite(reader, writer))
        stream = 1
        try:
            while not answering.done() and stream < MOST_STREAMS:
                due = int((time.monotonic() - begun) * share) - made
                for _ in range(max(0, due)):
                    writer.write(
                        frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, message)
                    )
                    stream += 2
                made += max(0, due)
                done["calls"] += max(0, due)
                await writer.drain()
                await asyncio.sleep(TICK_S)
            done["cut"] += 1
        except OSError:
            done["cut"] += 1
        finally:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, asyncio.IncompleteReadError):
                await answering
            writer.transport.abort()


async def attack(args: argparse.Namespace, token: bytes) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(args.seconds), asyncio.TaskGroup() as tasks:
            for _ in range(args.connections):
                tasks.create_task(unread(args, token))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-file", required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--job", default="")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    os.nice(5)  # a real attacker has its own machine and takes no CPU from the replica
    begun = time.monotonic()
    asyncio.run(attack(args, Path(args.token_file).read_bytes().strip()))
    print(json.dumps({"event": "attacked", "s": time.monotonic() - begun, **done}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
