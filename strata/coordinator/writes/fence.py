"""The fence: every write of a controller compares the leader's epoch. Controllers write in no other way.

A fence is made for one leader term. The fence does not send a write if the lease no longer permits this replica
to act. The fence ends the term immediately if etcd shows that the term is over (PROTOCOLS 4.2).
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
    """The part of leadership that a fence uses; `Election` implements it."""

    @property
    def epoch(self) -> Epoch | None:
        """The epoch in which this replica may act at this moment, or None."""
        ...

    def deposed(self, epoch: Epoch, reason: str) -> None:
        """End this epoch's term: a write has shown that the term is over."""
        ...


class Fence:
    """Executes transactions under `epoch`, for as long as `epoch` is the current epoch."""

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

        Resubmit while the outcome is unknown and this replica may act. `NotLeader` if the term is over: a submitted
        transaction may have taken effect, but not after a newer leader's writes.
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
                raise self._not_leader()
        (self._written if result.succeeded else self._outdated).add()
        await self._mirror.at_least(result.revision)
        return result

    async def settle(self, decide: Decide) -> None:
        """Execute the transactions of `decide` until there are none; raise its refusal.

        The leader needs no fresh view: its writes are fenced and compare the keys that they depend on, and a change
        that the view lacks starts the next turn.
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
            raise self._not_leader()
        return await self._store.execute(txn)

    def _not_leader(self) -> NotLeader:
        return NotLeader(f"this replica's term of epoch {self.epoch} is over", hint="")
