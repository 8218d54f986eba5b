"""An attacking member that reads nothing: many sessions, each in its own job, with all flow-control windows closed.

    python -m tests.integration.abuse.session_attacker --port 50051 --token-file w.token --worker w
        --sessions 16 --rate 2500 --seconds 4

No rate limit counts the calls of a session. The attacker requests answers of 60 KB, `--rate` times a second over all of
its sessions, and reconnects when its connection ends. Before it exits it prints its counts as JSON.
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

from strata.v1.datasets_pb2 import Dataset, GetAssignmentRequest, RegisterDatasetRequest
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import Call, Hello, Up
from tests.integration.abuse.attacker import (
    DATA,
    END_HEADERS,
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
DATASET = Dataset(name="d", shards=1, uri="/" + "u" * 60_000)
FRAME_BYTES = 16_384
"""The largest DATA frame that HTTP/2 allows without negotiation."""


def sent(stream: int, up: Up) -> bytes:
    """Return the DATA frames of a message."""
    body = up.SerializeToString()
    whole = b"\0" + struct.pack(">I", len(body)) + body
    return b"".join(
        frame(DATA, 0, stream, whole[at : at + FRAME_BYTES]) for at in range(0, len(whole), FRAME_BYTES)
    )


async def attacked(args: argparse.Namespace, token: bytes) -> None:
    """Attack on one connection until it ends."""
    reader, writer = await asyncio.open_connection(args.host, args.port)
    done["connections"] += 1
    writer.write(PREFACE + settings(initial_window_size=0))
    answering = asyncio.create_task(polite(reader, writer))
    block = request(b"/strata.v1.Sessions/Session", named(b"authorization", b"Bearer " + token))
    streams = [2 * number + 1 for number in range(args.sessions)]
    try:
        for stream in streams:
            member = Registration(
                job=f"unread-{stream}", worker_id=args.worker, boot=str(time.monotonic_ns()), slots=1
            )
            writer.write(
                frame(HEADERS, END_HEADERS, stream, block) + sent(stream, Up(hello=Hello(member=member)))
            )
            register = RegisterDatasetRequest(dataset=DATASET)
            writer.write(sent(stream, Up(call=Call(id=1, register_dataset=register))))
            await writer.drain()
            await asyncio.sleep(TICK_S)
        begun, made = time.monotonic(), 0
        asks = [
            sent(stream, Up(call=Call(id=2, get_assignment=GetAssignmentRequest(dataset="d"))))
            for stream in streams
        ]
        while not answering.done():
            due = int((time.monotonic() - begun) * args.rate) - made
            for number in range(made, made + due):
                writer.write(asks[number % len(asks)])
            made += due
            done["calls"] += due
            await writer.drain()
            await asyncio.sleep(TICK_S)
    finally:
        done["cut"] += answering.done()
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError, asyncio.IncompleteReadError):
            await answering
        writer.transport.abort()


async def attack(args: argparse.Namespace, token: bytes) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(args.seconds):
            while True:
                with contextlib.suppress(OSError):
                    await attacked(args, token)
                await asyncio.sleep(TICK_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-file", required=True)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2500.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    os.nice(5)  # a real attacker has its own machine and takes no CPU from the replica
    begun = time.monotonic()
    asyncio.run(attack(args, Path(args.token_file).read_bytes().strip()))
    print(json.dumps({"event": "attacked", "s": time.monotonic() - begun, **done}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
