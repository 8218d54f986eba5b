"""The unsent answers (*debts*) of this replica to its callers, counted for `core.access.unsent_answers`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from strata.coordinator.measures import Measures
from strata.core.access.authority import Identity
from strata.core.access.unsent_answers import Debts
from strata.errors import QuotaExceeded
from strata.observe import get_logger
from strata.wire.status import Aborts
from strata.wire.tls import Context as Caller

POLL_S: Final = 1.0
"""How often debts are checked."""

log = get_logger()


class Context(Aborts, Caller, Protocol):
    """The parts of a servicer's context that answering uses."""

    def add_done_callback(self, callback: Any) -> None:
        """Call back once the call has ended: its status was sent, or the client has disconnected."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The debts of one replica."""

    measures: Measures
    debts: Debts

    def account(self, context: Caller, identity: Identity | None) -> Account:
        """Return the account of an identity, over all its connections; without authentication, the account of the
        connection.
        """
        connection = context.peer()
        debtor = str(identity) if identity is not None else connection
        return Account(ledger=self, debtor=debtor, connection=connection)

    async def collect(self, end: Callable[[str], Awaitable[bool]]) -> None:
        """Close connections whose debt is too old or too large, until cancelled.

        `end` closes the connection of a peer; it returns False if there is none.
        """
        while True:
            await asyncio.sleep(POLL_S)
            for connection in list(self.debts.overdue(asyncio.get_running_loop().time())):
                if await end(connection):
                    self.measures.unread.child("closed").add()
                    log.warning("unread_connection_closed", peer=connection)
                else:
                    self.debts.written_off(connection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The debt to one caller, as its calls and streams count it (`wire.streams.Account`)."""

    ledger: Ledger
    debtor: str
    connection: str

    def check(self) -> None:
        try:
            self.ledger.debts.check(self.debtor)
        except QuotaExceeded:
            self.ledger.measures.unread.child("refused").add()
            raise

    def owe(self, size_bytes: int) -> Callable[[], None]:
        now_s, debts = asyncio.get_running_loop().time(), self.ledger.debts
        return partial(debts.paid, debts.owe(self.debtor, self.connection, size_bytes, now_s))
