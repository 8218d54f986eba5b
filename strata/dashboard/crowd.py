"""Who is connected, by address: one more than fit takes the place of the oldest of the same address.

So whoever holds connections open holds up neither others nor, for long, itself: a probe is let in.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class Crowd(Generic[C]):
    """At most `most` connections, and `per_address` from one address."""

    def __init__(self, *, most: int, per_address: int) -> None:
        self._most = most
        self._per_address = per_address
        self._by_address: dict[str, dict[C, None]] = {}
        self._address: dict[C, str] = {}

    def enter(self, connection: C, address: str) -> C | None:
        """Count a connection; return the one that has to go for it, which is counted no more.

        Where there are `most`, the oldest of the address that has the most goes.
        """
        gone = None
        own = self._by_address.get(address, {})
        if len(own) >= self._per_address:
            gone = next(iter(own))
        elif len(self._address) >= self._most:
            fullest = max(self._by_address, key=lambda each: len(self._by_address[each]))
            gone = next(iter(self._by_address[fullest]))
        if gone is not None:
            self.leave(gone)
        self._by_address.setdefault(address, {})[connection] = None
        self._address[connection] = address
        return gone

    def leave(self, connection: C) -> None:
        """Count a connection no more; nothing if it is not counted."""
        address = self._address.pop(connection, None)
        if address is None:
            return
        own = self._by_address[address]
        del own[connection]
        if not own:
            del self._by_address[address]
