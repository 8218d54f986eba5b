"""Loopback ports for processes that are about to start."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_LOWEST = 15_000
_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """Return `count` different TCP ports on which no process listens at this moment.

    If possible they are below the kernel's range of ephemeral ports. While a server restarts, any outgoing connection
    may take a port in that range. A client that tries to reach this very server may even connect to itself.

    Nothing keeps the ports free until they are used, so be ready to try others. The operating system's random numbers
    choose them: programs that seed `random` with the same value get different ports, and the sequence of `random` does
    not advance.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for candidate in _candidates():
            if len(ports) == count:
                return ports
            taken = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                taken.bind((host, candidate))
            except OSError:
                continue
            ports.append(taken.getsockname()[1])
    raise OSError(f"no {count} free ports on {host}")


def free_port(*, host: str = "127.0.0.1") -> int:
    """Return one port; see `free_ports`."""
    return free_ports(1, host=host)[0]


def is_free(port: int, *, host: str = "127.0.0.1") -> bool:
    """Tell whether a server could listen on the port at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _candidates() -> list[int]:
    try:
        first_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        first_ephemeral = 32_768
    if first_ephemeral < _LOWEST + 1_000:
        return [0] * 1_000
    return random.SystemRandom().sample(range(_LOWEST, first_ephemeral), 1_000)


def listens(pid: int, port: int) -> bool:
    """Tell whether a process listens on a TCP port, by the kernel's tables; False if the process has ended."""
    proc = Path(f"/proc/{pid}")
    try:
        links = [link.readlink().name for link in (proc / "fd").iterdir()]
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            if (proc / "net" / table).exists()
            for line in (proc / "net" / table).read_text().splitlines()[1:]
        ]
    except OSError:
        return False
    inodes = {line[9] for line in lines if line[3] == _LISTEN and int(line[1].rpartition(":")[2], 16) == port}
    return any(f"socket:[{inode}]" in links for inode in inodes)
