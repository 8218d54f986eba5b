"""The executor: decides on the view, executes the transaction, waits until the view shows it, decides again.

A decision reads the view and nothing else, and recognises its own effect, so it can be repeated as often as
needed. So the executor handles three hard cases in the same way (PROTOCOLS 2.2, 2.3):

- *Another writer was faster.* A compare failed: bring the view to that revision, decide again.
- *Outcome unknown.* Resubmit the same guarded transaction. If the first submission did take effect, the
  second fails its compares, and the next decision finds its own effect.
- *Nothing to do, or refused.* This is a decision too. Such a decision is final only if the view is at least as
  new as a linearizable read or transaction that began after the request arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

from strata.coordinator.measures import Measures
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.coalesce import Coalescer
from strata.core.kv.store import Store
from strata.core.kv.txn import Decision, Txn, TxnResult
from strata.core.kv.view import View
from strata.errors import Unavailable

DEADLINE_S: Final = 10.0
FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.5

Decide = Callable[[View], Decision]
T = TypeVar("T")


async def answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Call `ask` until etcd answers, and return the answer; the caller sets the time limit."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await ask()
        except Unavailable:
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)


class Executor:
    """Settles decisions. `run` must be running for decisions that may be coalesced."""

    def __init__(self, store: Store, mirror: Mirror, measures: Measures | None = None) -> None:
        retries = (Measures() if measures is None else measures).txn_retries
        self._conflicts = retries.child("conflict")
        self._unknowns = retries.child("unknown")
        self._store = store
        self._mirror = mirror
        self._coalescer = Coalescer(store)

    async def run(self) -> None:
        """Serve `settle(…, coalesce=True)` until cancelled."""
        await self._coalescer.run()

    async def settle(self, decide: Decide, *, deadline_s: float = DEADLINE_S, coalesce: bool = False) -> None:
        """Return once `decide` finds nothing left to do; the view then shows the results.

        Raise the decision's refusal, or `Unavailable` when the deadline passes: a transaction submitted before
        may then still take effect. With `coalesce`, transactions that come close together share a commit: for
        acks, exits and other writes that many members send at the same time.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._settle(decide, coalesce)
        except TimeoutError:
            raise Unavailable(f"etcd did not settle this within {deadline_s:g} s") from None

    async def execute(self, txn: Txn) -> TxnResult:
        """Return the outcome of a guarded transaction once it is known and the view shows it.

        Resubmit while the outcome is unknown; the caller sets the time limit.
        """
        return await self._until_known(txn, self._store.execute)

    async def _settle(self, decide: Decide, coalesce: bool) -> None:
        fresh = False
        pause_s = 0.0
        execute = self._coalescer.execute if coalesce else self._store.execute
        while True:
            decision = decide(self._mirror.view)
            if decision.txn is not None:
                # The answer passed through etcd's log after the request began, so it is as good as a fresh read.
                result = await self._until_known(decision.txn, execute)
                fresh = True
                if not result.succeeded:  # another writer changed the same keys
                    self._conflicts.add()
                    await asyncio.sleep(pause_s)
                    pause_s = min(LONGEST_PAUSE_S, 2 * pause_s or 0.001)
            elif not fresh:
                await answered(self._mirror.fresh)
                fresh = True
            elif decision.refusal is not None:
                raise decision.refusal
            else:
                return

    async def _until_known(self, txn: Txn, execute: Callable[[Txn], Awaitable[TxnResult]]) -> TxnResult:
        result = await answered(partial(self._submit, txn, execute))
        await self._mirror.at_least(result.revision)
        return result

    async def _submit(self, txn: Txn, execute: Callable[[Txn], Awaitable[TxnResult]]) -> TxnResult:
        try:
            return await execute(txn)
        except Unavailable:
            self._unknowns.add()
            raise
