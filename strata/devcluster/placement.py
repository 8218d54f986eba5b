"""Where a process of a local cluster runs: on loopback, or in a network namespace of its own."""

from __future__ import annotations

from dataclasses import dataclass

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """An address, and the command that enters the network namespace in which it is.

    Without `enter` the address is this machine's own. With it, the namespace is taken to belong
    to that one process, so its ports are the usual ones.
    """

    host: str = HOST
    enter: tuple[str, ...] = ()
