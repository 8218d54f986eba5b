"""Limits for unsent answers: answers that a handler gave to the transport and the client has not read yet.

A client that keeps its HTTP/2 window closed but answers pings looks alive to the transport, and the transport keeps
every answer to this client in memory. So each answer counts as a *debt* of its caller, the *debtor*. The debt
begins when the answer is created. The debt ends when the transport reports the call as ended, after the last byte
was sent. A message of a stream is a debt from the time it is queued until it is written. Three rules bound the
debts:

1. A debtor (an identity, or a connection if callers are not authenticated) has debts of at most `each_bytes`. Above
   this limit the debtor's calls get no answer. A stream that pushes messages has a limit of its own
   (`wire.streams`).
2. A debt lasts at most `longest_s`. Then the replica closes the debt's connection, which ends the connection's
   calls and frees memory.
3. All debts together have at most `all_bytes`. Above this limit connections are closed early, those of the largest
   debtors first; a connection whose debts are all younger than `least_s` stays open. Limit: on a slow link this may
   close the connection of a client that does read; clients with small debts come last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from strata.errors import QuotaExceeded


@dataclass(frozen=True, slots=True, kw_only=True)
class DebtLimits:
    each_bytes: int = 8 << 20
    all_bytes: int = 64 << 20
    longest_s: float = 60.0
    least_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Debt:
    """One answer to `debtor` on `connection` that is not sent yet."""

    debtor: str
    connection: str
    size_bytes: int
    since_s: float


@dataclass(slots=True, kw_only=True)
class Debts:
    """The debts of one replica; times are of any monotonic clock."""

    limits: DebtLimits = field(default_factory=DebtLimits)
    total_bytes: int = 0
    _by_debtor: Counter[str] = field(default_factory=Counter)
    _oldest_first: dict[Debt, None] = field(default_factory=dict)

    def check(self, debtor: str) -> None:
        """Raise `QuotaExceeded` if `debtor` must read more before it gets another answer."""
        owed = self._by_debtor[debtor]
        if owed >= self.limits.each_bytes:
            raise QuotaExceeded(
                f"{owed} bytes of answers are waiting for {debtor} to read them, the limit",
                hint="read the answers to the calls under way before you make more",
            )

    def owe(self, debtor: str, connection: str, size_bytes: int, now_s: float) -> Debt:
        """Add an answer's debt and return it."""
        debt = Debt(debtor=debtor, connection=connection, size_bytes=size_bytes, since_s=now_s)
        self._oldest_first[debt] = None
        self._by_debtor[debtor] += size_bytes
        self.total_bytes += size_bytes
        return debt

    def paid(self, debt: Debt) -> None:
        """Remove a debt: its call has ended, with or without an error."""
        if debt not in self._oldest_first:
            return
        del self._oldest_first[debt]
        self.total_bytes -= debt.size_bytes
        self._by_debtor[debt.debtor] -= debt.size_bytes
        if not self._by_debtor[debt.debtor]:
            del self._by_debtor[debt.debtor]

    def written_off(self, connection: str) -> None:
        """Remove all debts of a connection that does not exist any more."""
        for debt in [each for each in self._oldest_first if each.connection == connection]:
            self.paid(debt)

    def overdue(self, now_s: float) -> Iterator[str]:
        """Yield each connection to close, once."""
        found = dict.fromkeys(debt.connection for debt in self._older(self.limits.longest_s, now_s))
        yield from found
        if self.total_bytes <= self.limits.all_bytes:
            return
        owed, most = Counter[str](), Counter[str]()
        for debt in self._oldest_first:
            owed[debt.connection] += debt.size_bytes
            most[debt.connection] = max(most[debt.connection], self._by_debtor[debt.debtor])
        left = self.total_bytes - sum(owed[connection] for connection in found)
        old = dict.fromkeys(debt.connection for debt in self._older(self.limits.least_s, now_s))
        for connection in sorted(old, key=lambda each: (-most[each], -owed[each])):  # ties: the oldest first
            if connection not in found and left > self.limits.all_bytes:
                left -= owed[connection]
                yield connection

    def _older(self, age_s: float, now_s: float) -> Iterator[Debt]:
        return takewhile(lambda debt: now_s - debt.since_s >= age_s, self._oldest_first)
