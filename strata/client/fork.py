"""What a fork does to a process with gRPC connections, and how the child is made harmless.

A rank of an agent uses no gRPC: its one socket is closed in forked children by `strata.session.framed`. A standalone
process, and whoever makes unary calls, does. DataLoader workers are forked from it. The child inherits gRPC's sockets,
and while it keeps them open the kernel tells nobody that the parent died. It also inherits gRPC's memory without gRPC's
threads. So three things are done here:

- gRPC's own fork handlers are off (`GRPC_ENABLE_FORK_SUPPORT=0`, set by `strata/__init__.py`
  before grpc is imported): with grpc.aio in a thread they crash the child.
- Right after a fork the child closes every socket whose peer is one of our endpoints, found in
  /proc/self/fd. The descriptor's number is kept busy with /dev/null, so that what gRPC's dead
  memory might still close is nothing of the child's.
- The child refuses to use this library, with an error that says what to do. Children that are
  spawned (spawn, forkserver, subprocess) inherit nothing and are free.

A socket is ours when its peer is an endpoint's address and port; for an endpoint given by name,
when the port matches, since only gRPC knows to which of the name's addresses it connected.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Final

from strata.client.endpoints import Endpoint
from strata.errors import ConfigError

_SETTING: Final = "GRPC_ENABLE_FORK_SUPPORT"
_TCP_SYN_SENT: Final = 2

_guarded: Counter[Endpoint] = Counter()
_user: int | None = None
_forked_from: int | None = None


def check_import_order() -> None:
    """Raise `ConfigError` if grpc was imported with its fork handlers on."""
    if os.environ.get(_SETTING, "").lower() not in {"0", "false"}:
        raise ConfigError(
            f"grpc was imported before strata, and {_SETTING} is not 0:"
            " a forked child (a DataLoader worker) would crash",
            hint=f"import strata before grpc, or set {_SETTING}=0 in the environment",
        )


def allow_grpc() -> None:
    """Raise `ConfigError` unless this library may use grpc here; from now on no forked child may use the library."""
    check_import_order()
    claim()


def claim() -> None:
    """Raise `ConfigError` in a forked child of a user; from now on no forked child of this process may be one."""
    global _user  # noqa: PLW0603  # a fact about the process
    refuse_in_child()
    _user = os.getpid()


def refuse_in_child() -> None:
    """Raise `ConfigError` in a process forked from one that uses this library."""
    if _forked_from is not None:
        raise ConfigError(
            f"process {os.getpid()} was forked from {_forked_from}, whose connection to the"
            " coordinators it cannot use",
            hint="call Strata in the parent; a child that is started by 'spawn' or 'forkserver' may connect by itself,"
            " unless its parent is a rank of an agent",
        )


@contextlib.contextmanager
def guarding(endpoint: Endpoint) -> Iterator[None]:
    """Have sockets to `endpoint` closed in every child that is forked meanwhile."""
    _guarded[endpoint] += 1
    try:
        yield
    finally:
        _guarded[endpoint] -= 1
        if not _guarded[endpoint]:
            del _guarded[endpoint]


def _after_in_child() -> None:
    global _forked_from  # noqa: PLW0603  # a fact about the process
    if _user is None:
        return
    _forked_from = _user
    if not _guarded:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # plain numbers, fast
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                fd = int(name)
                if stat.S_ISSOCK(os.fstat(fd).st_mode) and _is_ours(fd):
                    os.dup2(null, fd, inheritable=False)
    finally:
        os.close(null)


def _is_ours(fd: int) -> bool:
    sock = socket.socket(fileno=fd)
    try:
        if sock.type != socket.SOCK_STREAM:
            return False
        try:
            peer = sock.getpeername()
        except OSError:
            return _is_connecting(sock)
        if sock.family == socket.AF_UNIX:
            return any(e.path == peer for e in _guarded if e.path)
        if sock.family not in {socket.AF_INET, socket.AF_INET6}:
            return False
        host = peer[0].removeprefix("::ffff:")
        return any(e.port == peer[1] and (not e.is_literal or e.host == host) for e in _guarded)
    finally:
        sock.detach()


def _is_connecting(sock: socket.socket) -> bool:
    """Tell whether a socket without a peer is on its way to one: it may be ours, so it counts.

    A connection that another part of the program had just begun when it forked is closed in the
    child as well; the parent's is untouched.
    """
    if sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return False
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_SYN_SENT


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_after_in_child)
