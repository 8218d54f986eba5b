"""Input that no client of Strata sends: garbage, floods, messages of random bytes, invalid oneofs.

The replica ends the call with a status, or ends the connection, and goes on serving.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from strata.errors import InvalidArgument
from strata.v1 import barriers_pb2, members_pb2, peers_pb2, session_pb2
from strata.wire.status import from_rpc
from tests.cluster_fixtures import StartCluster
from tests.integration.bad_input.place import PATHS, Place, place, send

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@pytest.fixture(scope="module")
def there(start_module_cluster: StartCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(start_module_cluster(coordinators=2), tmp_path_factory.mktemp("place")) as made:
        yield made


def frame(kind: int, body: bytes, *, flags: int = 0, stream: int = 0, length: int | None = None) -> bytes:
    declared = len(body) if length is None else length
    return declared.to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


GARBAGE = {
    "nothing": b"",
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random bytes": random.Random(1).randbytes(100_000),
    "TLS": bytes.fromhex("16030100c2010000be0303") + random.Random(2).randbytes(200),
    "zeros": b"\0" * 100_000,
    "a preface, then random bytes": PREFACE + random.Random(3).randbytes(100_000),
    "a frame of 16 MiB that does not come": PREFACE
    + SETTINGS
    + frame(0, b"", stream=1, length=(1 << 24) - 1),
    "data without a stream": PREFACE + SETTINGS + frame(0, b"x" * 100, stream=1),
    "headers that are none": PREFACE + SETTINGS + frame(1, b"\xff" * 100, flags=4, stream=1),
    "an even stream": PREFACE + SETTINGS + frame(1, b"\x82", flags=4, stream=2),
    "settings of odd length": PREFACE + frame(4, b"abc"),
    "resets without end": PREFACE + SETTINGS + frame(3, b"\0\0\0\0", stream=1) * 5000,
    "pings without end": PREFACE + SETTINGS + frame(6, b"\0" * 8) * 5000,
}


@pytest.mark.parametrize("sent", GARBAGE.values(), ids=GARBAGE)
def test_bytes_that_are_no_grpc_harm_no_replica(sent: bytes, there: Place) -> None:
    for coordinator in there.cluster.coordinators:
        host, port = coordinator.address.split(":")
        with (
            socket.create_connection((host, int(port)), timeout=10) as connection,
            contextlib.suppress(OSError),  # a reset connection is a valid answer too
        ):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    there.check()


@pytest.mark.parametrize("path", sorted(set(PATHS.values())))
def test_random_bytes_as_a_request_are_refused(path: str, there: Place) -> None:
    """The bytes begin with a field of an unknown wire type, so they cannot be a valid message by chance."""
    rng = random.Random(path)
    for size in (1, 7, 100, 3000):
        with pytest.raises(grpc.RpcError) as caught:
            send(there.cluster.coordinators[0].address, path, b"\x07" + rng.randbytes(size), timeout_s=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = from_rpc(caught.value, "here")
        assert type(error) is InvalidArgument
        assert "proto files" in error.hint
    there.check()


def unicode(name: str) -> bytes:
    """Return a GetJobRequest whose job is not UTF-8."""
    return b"\x0a" + bytes([len(name) + 2]) + b"\xff\xfe" + name.encode()


def test_ids_that_are_not_text_are_refused(there: Place) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        send(there.cluster.coordinators[0].address, "/strata.v1.Worlds/GetJob", unicode("x"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in from_rpc(caught.value, "here").message
    there.check()


def test_an_unknown_method_is_unimplemented(there: Place) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        send(there.cluster.coordinators[0].address, "/strata.v1.Worlds/Nothing", b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    there.check()


Up = Callable[[Place], list[bytes]]


def hello(place: Place) -> bytes:
    member = members_pb2.Registration(job="strange", worker_id="f0", boot="b", slots=1)
    return session_pb2.Up(hello=session_pb2.Hello(member=member)).SerializeToString()


def arrivals(**facts: object) -> bytes:
    whole: dict[str, Any] = {"job": "strange", "name": "b", "generation": 1, "round": 1, "ranks": [0]} | facts
    arrival = barriers_pb2.Arrival(**whole)
    return session_pb2.Up(arrivals=session_pb2.Arrivals(arrivals=[arrival])).SerializeToString()


SESSIONS: dict[str, Up] = {
    "nothing at all": lambda p: [],
    "no hello": lambda p: [session_pb2.Up(tick=session_pb2.Tick()).SerializeToString()],
    "an empty message": lambda p: [b""],
    "random bytes": lambda p: [random.Random(4).randbytes(1000)],
    "a hello without anybody": lambda p: [session_pb2.Up(hello=session_pb2.Hello()).SerializeToString()],
    "two hellos": lambda p: [hello(p), hello(p)],
    "an unknown oneof": lambda p: [hello(p), b"\xba\x3e\x03abc"],
    "garbage after the hello": lambda p: [hello(p), random.Random(5).randbytes(100)],
    "an arrival of nowhere": lambda p: [hello(p), arrivals(job="witness"), arrivals(generation=99)],
    "an arrival with a job that is none": lambda p: [hello(p), arrivals(job="../witness")],
    "an arrival of a huge round": lambda p: [hello(p), arrivals(round=2**62)],
    "a message of 5 MiB": lambda p: [hello(p), arrivals(payloads=[b"x" * (5 << 20)])],
    "a call without a request": lambda p: [
        hello(p),
        session_pb2.Up(call=session_pb2.Call(id=1)).SerializeToString(),
    ],
    "a rank's end of nowhere": lambda p: [
        hello(p),
        session_pb2.Up(rank_exit=session_pb2.RankExit(id=1, generation=-5, rank=-1)).SerializeToString(),
    ],
}
PEERS: dict[str, Up] = {
    "no hello": lambda p: [peers_pb2.PeerUp().SerializeToString()],
    "random bytes": lambda p: [random.Random(6).randbytes(1000)],
    "a stranger": lambda p: [
        peers_pb2.PeerUp(hello=peers_pb2.PeerHello(replica="x" * 10_000, instance="i")).SerializeToString()
    ],
    "a heartbeat first": lambda p: [
        peers_pb2.PeerUp(
            heartbeat=peers_pb2.PeerHeartbeat(id=1, job="witness", worker_id="w0")
        ).SerializeToString()
    ],
}
STREAMS = [
    *((f"session: {name}", "/strata.v1.Sessions/Session", up) for name, up in SESSIONS.items()),
    *((f"peers: {name}", "/strata.v1.Peers/Link", up) for name, up in PEERS.items()),
]


@pytest.mark.parametrize(("path", "up"), [case[1:] for case in STREAMS], ids=[case[0] for case in STREAMS])
def test_a_malformed_stream_ends_without_affecting_others(path: str, up: Up, there: Place) -> None:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(there.cluster.coordinators[0].address, options=options) as channel:
        call: Any = channel.stream_stream(path)(iter(up(there)), timeout=8)  # type: ignore[arg-type]  # no serializer: raw bytes
        with contextlib.suppress(grpc.RpcError):
            for _answer in call:
                pass
        ends = call.code()
        assert ends not in {grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}, call.details()
    there.check()
