"""What this replica owes to those it answers (`core.debts`), as its servicers note it down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from strata.coordinator.measures import Measures
from strata.core.authority import Identity
from strata.core.debts import Debt, Debts
from strata.errors import QuotaExceeded
from strata.observe import get_logger
from strata.wire.status import Aborts
from strata.wire.tls import Context as Caller

LOOK_S: Final = 1.0
"""How often debts are looked at."""

log = get_logger()


class Context(Aborts, Caller, Protocol):
    """What answering needs of a servicer's context."""

    def add_done_callback(self, callback: Any) -> None:
        """Call back once the call has ended: its status was sent, or the client is gone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The debts of one replica."""

    measures: Measures
    debts: Debts

    def check(self, context: Caller, identity: Identity | None) -> None:
        """Return if more may be owed to the caller; else `QuotaExceeded`."""
        try:
            self.debts.check(_debtor(context, identity))
        except QuotaExceeded:
            self.measures.unread.child("refused").add()
            raise

    def owe(self, context: Context, identity: Identity | None, size_bytes: int) -> None:
        """Count what is given to the transport, until the call has ended."""
        debt = self._owe(context, identity, size_bytes)
        context.add_done_callback(lambda _context: self.debts.paid(debt))

    @contextmanager
    def owing(self, context: Caller, identity: Identity | None, size_bytes: int) -> Iterator[None]:
        """Count one message of a stream for as long as the block, which has it written, runs."""
        debt = self._owe(context, identity, size_bytes)
        try:
            yield
        finally:
            self.debts.paid(debt)

    async def collect(self, end: Callable[[str], Awaitable[bool]]) -> None:
        """Close connections that have been owed for too long, or too much, until cancelled.

        `end` closes the connection of a peer; False if there is none.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            for connection in list(self.debts.overdue(asyncio.get_running_loop().time())):
                if await end(connection):
                    self.measures.unread.child("closed").add()
                    log.warning("unread_connection_closed", peer=connection)
                else:
                    self.debts.written_off(connection)

    def _owe(self, context: Caller, identity: Identity | None, size_bytes: int) -> Debt:
        now_s = asyncio.get_running_loop().time()
        return self.debts.owe(_debtor(context, identity), context.peer(), size_bytes, now_s)


def _debtor(context: Caller, identity: Identity | None) -> str:
    """Return who is owed: an identity, over all of its connections; a connection where nobody is asked."""
    return str(identity) if identity is not None else context.peer()
