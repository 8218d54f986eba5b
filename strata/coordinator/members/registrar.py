"""Registration of a member at this replica, by a session or by a unary call.

A process that registers under a live key of another boot is a *newcomer* (PROTOCOLS 5.2). The newcomer waits while it
is unknown whether the old process is alive. If the old process loses its transport at this replica, the newcomer
supersedes it immediately. If the old process loses its transport at another replica, that replica deletes the key.
After `detect_s` the newcomer is refused, unless the old process's replica itself is lost: then the leader is about to
delete the key.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from strata.coordinator.context import ReplicaContext
from strata.coordinator.members.failure_detector import FailureDetector, Transport
from strata.core.job import JobView
from strata.core.kv.records import Replica, Worker
from strata.core.kv.txn import Decision, Put, Txn, unchanged
from strata.core.kv.view import Entry, View
from strata.core.members.membership import decide_register
from strata.core.members.registration import Registration
from strata.errors import Conflict, StaleIncarnation, Unavailable

ORPHAN_HOLD_S = 15.0
"""The longest time that a newcomer waits while the leader is expected to delete the key, or while this replica
deletes nobody."""

POLL_S = 1.0
"""How often the decision about a waiting newcomer is repeated without a change of the view."""


class Registrar:
    """Makes a member's boot the holder of its worker key, served by this replica."""

    def __init__(self, context: ReplicaContext, failure_detector: FailureDetector) -> None:
        self._context = context
        self._failure_detector = failure_detector

    async def register(
        self, transport: Transport, registration: Registration, *, leaving: bool = False
    ) -> Entry[Worker]:
        """Return the worker key once it belongs to this boot, and this replica serves it.

        `transport` counts as up from this call on. If the method raises, the caller decides how long the
        transport stays up. `leaving`: only take over an existing key; create none.
        """
        job = transport.job
        self._failure_detector.connected(transport)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                await self._settle(job, registration, leaving)
                return self._registered(job, registration)
            except Conflict:
                held_s = self._context.timing.detect_s
                if self._orphaned(job, registration) or self._failure_detector.spares():
                    held_s = max(held_s, ORPHAN_HOLD_S)
                left_s = began + held_s - loop.time()
                if left_s <= 0:
                    raise
                with suppress(TimeoutError):  # check again if the holder's replica is alive
                    async with asyncio.timeout(min(left_s, POLL_S)):
                        await self._failure_detector.changed(job, registration.worker)

    async def _settle(self, job: str, registration: Registration, leaving: bool) -> None:
        keys = self._context.keys.job(job)

        def decide(view: View) -> Decision:
            decision = decide_register(
                JobView(view, keys),
                registration,
                served_by=self._context.instance,
                failed_incarnation=self._failure_detector.failed_incarnation(job, registration.worker),
                max_jobs=self._context.config.max_jobs,
                leaving=leaving,
            )
            kv = view.get(keys.worker(registration.worker))
            done = decision.txn is None and decision.refusal is None
            if (
                not done
                or kv is None
                or kv.mod_revision != self._failure_detector.pending_removal(job, registration.worker)
            ):
                return decision
            return Decision(
                reason=f"{registration.worker} is back before its removal",
                txn=Txn(
                    compares=(unchanged(kv.key, kv.mod_revision),), success=(Put(key=kv.key, value=kv.value),)
                ),
            )

        await self._context.executor.settle(decide, coalesce=True)

    def _registered(self, job: str, registration: Registration) -> Entry[Worker]:
        """Return the key, unless another writer changed it just after the registration."""
        entry = self._worker(job, registration)
        if entry is None:
            raise Unavailable(f"{registration.worker} was removed while it registered")
        if entry.record.boot != registration.boot:
            raise StaleIncarnation(f"{registration.worker} was replaced while it registered")
        if entry.record.served_by != self._context.instance:
            raise Unavailable(f"{registration.worker} registered at another replica meanwhile")
        return entry

    def _orphaned(self, job: str, registration: Registration) -> bool:
        """True if the replica that serves the key's holder is lost."""
        entry = self._worker(job, registration)
        if entry is None:
            return False
        replicas = self._context.mirror.view.entries(self._context.keys.replicas, Replica)
        return all(replica.record.instance != entry.record.served_by for replica in replicas)

    def _worker(self, job: str, registration: Registration) -> Entry[Worker] | None:
        return self._context.job(job).worker(registration.worker)
