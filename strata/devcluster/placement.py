"""Placement of a process of a local cluster: on loopback, or in a network namespace of its own."""

from __future__ import annotations

from dataclasses import dataclass

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """An address, and the command that enters the network namespace of that address.

    Without `enter` the address belongs to this machine. With `enter`, the process is assumed to be alone in the
    namespace, and therefore uses the default ports.
    """

    host: str = HOST
    enter: tuple[str, ...] = ()
