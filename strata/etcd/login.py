"""Login: the token that etcd's user authentication requires, and its renewal.

A token exists only in the memory of etcd's members: it expires when unused, and is lost at a restart and at
every change of users and roles. So no token is renewed ahead of time. The first call that finds a token stale
logs in again, once for all calls that found the same token stale.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from grpc.aio import Metadata

_REQUIRE_LEADER: Final = ("hasleader", "true")


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user of etcd. The password appears in no log."""

    user: str
    password: str = field(repr=False)


class Login:
    """The metadata of calls (`plain`) and of streams that need a leader (`streams`)."""

    __slots__ = ("_authenticate", "_lock", "possible", "plain", "streams")

    def __init__(self, authenticate: Callable[[], Awaitable[str]] | None) -> None:
        """`authenticate` returns a new token, "" if etcd requires none. Without a user `authenticate` is None."""
        self._authenticate = authenticate
        self._lock = asyncio.Lock()
        self.possible = authenticate is not None
        self.plain = Metadata()
        self.streams = Metadata(_REQUIRE_LEADER)

    async def renew(self, stale: Metadata) -> None:
        """Log in, unless another call has meanwhile done so: then `plain` is no longer `stale`."""
        if self._authenticate is None:
            return
        async with self._lock:
            if self.plain is not stale:
                return
            token = await self._authenticate()
            parts = (("token", token),) if token else ()
            self.plain = Metadata(*parts)
            self.streams = Metadata(_REQUIRE_LEADER, *parts)
