"""The only way in which controllers write: every transaction compares the leader's epoch.

A fence is made for one term of office. It refuses before it sends when the lease says that this
replica may not act any more, and it ends the term at once when etcd says so (PROTOCOLS 4.2).
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from strata.coordinator.measures import Measures
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Decide, answered
from strata.core.ids import Epoch
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.store import Store
from strata.core.kv.txn import Range, Txn, TxnResult, created_at
from strata.errors import NotLeader


class Term(Protocol):
    """What a fence asks of leadership; `Election` is one."""

    @property
    def epoch(self) -> Epoch | None:
        """The epoch in which this replica may act at this moment, or None."""
        ...

    def deposed(self, epoch: Epoch, reason: str) -> None:
        """End this epoch's term: somebody has seen that it is over."""
        ...


class Fence:
    """Executes transactions under `epoch`, for as long as that is the current one."""

    def __init__(
        self,
        *,
        store: Store,
        mirror: Mirror,
        keys: ClusterKeys,
        term: Term,
        epoch: Epoch,
        measures: Measures | None = None,
    ) -> None:
        writes = (Measures() if measures is None else measures).fenced_writes
        self._written = writes.child("written")
        self._outdated = writes.child("outdated")
        self._fenced_off = writes.child("fenced_off")
        self.epoch = epoch
        self._store = store
        self._mirror = mirror
        self._term = term
        self._leader_key = keys.leader
        self._compare = created_at(keys.leader, epoch)

    async def execute(self, txn: Txn) -> TxnResult:
        """Return the outcome of `txn` under the fence, once the view shows it.

        Resubmits while the outcome is unknown and this replica may act. `NotLeader` when the
        term is over; what was sent may have taken effect, but not after somebody else's.
        """
        fenced = txn if self._compare in txn.compares else txn.and_if(self._compare)
        fenced = Txn(
            compares=fenced.compares,
            success=fenced.success,
            failure=(*fenced.failure, Range(key=self._leader_key)),
        )
        result = await answered(partial(self._submit, fenced))
        if not result.succeeded:
            (leader,) = result.reads[-1].kvs or (None,)
            if leader is None or leader.create_revision != self.epoch:
                self._fenced_off.add()
                self._term.deposed(self.epoch, "a write met a newer epoch")
                raise self._over()
        (self._written if result.succeeded else self._outdated).add()
        await self._mirror.at_least(result.revision)
        return result

    async def settle(self, decide: Decide) -> None:
        """Carry out what `decide` finds, until it finds nothing; raises its refusal.

        The leader reads its own view: its writes are fenced and compare what they rest on, and
        what the view lacks comes with the next change.
        """
        while True:
            decision = decide(self._mirror.view)
            if decision.txn is None:
                if decision.refusal is not None:
                    raise decision.refusal
                return
            await self.execute(decision.txn)

    async def _submit(self, txn: Txn) -> TxnResult:
        if self._term.epoch != self.epoch:
            raise self._over()
        return await self._store.execute(txn)

    def _over(self) -> NotLeader:
        return NotLeader(f"this replica's term of epoch {self.epoch} is over", hint="")
