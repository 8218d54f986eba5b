"""Which inherited sockets a forked child closes. Real forks are in tests/integration/test_fork.py."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from strata import errors
from strata.client import fork
from strata.client.endpoints import parse_endpoints
from strata.client.fork import _is_ours, check_import_order, guarding


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as sockets:
        yield sockets


def connected(stack: ExitStack, host: str = "127.0.0.1") -> tuple[socket.socket, socket.socket, int]:
    """Return both ends of a TCP connection and the port it was made to."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = stack.enter_context(socket.create_server((host, 0), family=family))
    port = listener.getsockname()[1]
    client = stack.enter_context(socket.create_connection((host, port)))
    accepted, _ = listener.accept()
    stack.enter_context(accepted)
    return client, accepted, port


@pytest.mark.parametrize(
    ("host", "endpoint", "ours"),
    [
        ("127.0.0.1", "127.0.0.1:{}", True),
        ("127.0.0.1", "localhost:{}", True),
        ("127.0.0.1", "127.0.0.2:{}", False),
        ("::1", "[::1]:{}", True),
        ("::1", "127.0.0.1:{}", False),
        ("127.0.0.1", "127.0.0.1:1", False),
        ("127.0.0.1", "localhost:1", False),
    ],
)
def test_tcp_sockets_to_our_endpoints(stack: ExitStack, host: str, endpoint: str, ours: bool) -> None:
    client, accepted, port = connected(stack, host)
    with guarding(*parse_endpoints(endpoint.format(port))):
        assert _is_ours(client.fileno()) is ours
        assert not _is_ours(accepted.fileno()), "the side that serves is not the client's"
    assert not _is_ours(client.fileno()), "guarded only inside"
    client.send(b"x")  # looking closes nothing


def test_ipv4_over_an_ipv6_socket_as_grpc_makes_it(stack: ExitStack) -> None:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = listener.getsockname()[1]
    client = stack.enter_context(socket.socket(socket.AF_INET6))
    client.connect(("::ffff:127.0.0.1", port))
    with guarding(*parse_endpoints(f"127.0.0.1:{port}")):
        assert _is_ours(client.fileno())


def test_unix_sockets_by_their_path(stack: ExitStack, tmp_path: Path) -> None:
    for name in ("a", "b"):
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(tmp_path / name))
        listener.listen()
    client = stack.enter_context(socket.socket(socket.AF_UNIX))
    client.connect(str(tmp_path / "a"))
    with guarding(*parse_endpoints(f"unix:{tmp_path}/b")):
        assert not _is_ours(client.fileno())
    with guarding(*parse_endpoints(f"unix:{tmp_path}/a")):
        assert _is_ours(client.fileno())


def test_a_connection_on_its_way_counts_and_an_unconnected_socket_does_not(stack: ExitStack) -> None:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    tries = []
    for _ in range(4):  # its queue is soon full: the next ones are not answered
        one = stack.enter_context(socket.socket())
        one.setblocking(False)
        one.connect_ex(listener.getsockname())
        tries.append(one)
    with guarding(*parse_endpoints("127.0.0.1:1")):
        assert _is_ours(tries[-1].fileno())
        assert not _is_ours(listener.fileno())
        assert not _is_ours(stack.enter_context(socket.socket()).fileno())
        assert not _is_ours(stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)).fileno())
        for end in socket.socketpair():
            assert not _is_ours(stack.enter_context(end).fileno())


def test_an_endpoint_guarded_twice_is_guarded_until_both_are_done() -> None:
    (endpoint,) = parse_endpoints("127.0.0.1:1")
    with guarding(endpoint):
        with guarding(endpoint):
            pass
        assert endpoint in fork._guarded
    assert endpoint not in fork._guarded


@pytest.mark.parametrize(("value", "fine"), [("0", True), ("false", True), ("1", False), (None, False)])
def test_grpcs_fork_handlers_must_be_off(
    value: str | None, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    if value is not None:
        monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", value)
    if fine:
        check_import_order()
    else:
        with pytest.raises(errors.ConfigError) as refusal:
            check_import_order()
        assert refusal.value.hint


def test_a_child_of_a_process_without_a_session_may_use_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "_user", None)
    monkeypatch.setattr(fork, "_forked_from", None)
    fork._after_in_child()
    fork.refuse_in_child()
    monkeypatch.setattr(fork, "_user", os.getpid())
    fork._after_in_child()
    with pytest.raises(errors.ConfigError, match="was forked from"):
        fork.refuse_in_child()
