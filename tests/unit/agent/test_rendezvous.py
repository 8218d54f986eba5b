"""The rendezvous of ranks: its payload, and a port that no other process gets."""

from __future__ import annotations

import socket

import pytest

from strata.agent.rendezvous import Meeting, ReservedPort
from strata.devcluster.ports import free_port, is_free
from strata.errors import Refused


def listener(port: int, *, family: int = socket.AF_INET6) -> socket.socket:
    """Return a socket that listens as torch's store does: on all addresses, with SO_REUSEADDR."""
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("", port))
    server.listen()
    return server


def test_a_meeting_survives_the_wire() -> None:
    meeting = Meeting("fe80::1", 29500)
    assert Meeting.decode(meeting.encode()) == meeting


@pytest.mark.parametrize(
    "payload", [b"", b"not json", b"[]", b'{"address": "a"}', b'{"port": null}', b"\xff"]
)
def test_another_program_s_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(Refused, match="no meeting address") as refused:
        Meeting.decode(payload)
    assert "same version" in refused.value.hint


def test_the_store_may_listen_on_a_reserved_port() -> None:
    with ReservedPort() as reserved, listener(reserved.port) as server:
        reserved.close()
        with socket.create_connection(("127.0.0.1", reserved.port), timeout=10) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b"", "and it stays when the reservation ends"


def test_a_reserved_port_is_assigned_to_no_other_socket() -> None:
    with ReservedPort() as reserved:
        given = set()
        for _ in range(2000):
            with socket.socket() as other:
                other.bind(("", 0))
                given.add(other.getsockname()[1])
        assert reserved.port not in given


def test_ports_are_fresh() -> None:
    with ReservedPort() as one, ReservedPort() as other:
        assert one.port != other.port


def test_a_taken_port_is_not_free() -> None:
    port = free_port()
    assert is_free(port)
    with listener(port, family=socket.AF_INET):
        assert not is_free(port)
    assert is_free(port)
