"""Registering a member at this replica, whichever way it came: by a session, or by a call.

Another boot on a live key is a newcomer (PROTOCOLS 5.2): it is held while it is unknown whether
the old process is alive. The old one's transport may fail here, which supersedes it at once; or at
the replica that serves it, which then deletes the key. After `detect_s` it is refused, but
not while the old one's replica itself is gone: then the leader is about to delete the key.
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
"""How long a newcomer is held at most, for a key that the leader is expected to delete, or while
this replica deletes nobody."""

LOOK_S = 1.0
"""How often a newcomer that is held is decided about without a change."""


class Registrar:
    """Makes a member's boot the holder of its key, served by this replica."""

    def __init__(self, context: ReplicaContext, failure_detector: FailureDetector) -> None:
        self._context = context
        self._failure_detector = failure_detector

    async def register(
        self, transport: Transport, registration: Registration, *, leaving: bool = False
    ) -> Entry[Worker]:
        """Return the worker key once it is this boot's, and served here.

        `transport` counts as up from now on. When this raises, the caller says until when. `leaving`:
        only a key that is there is taken over.
        """
        job = transport.job
        self._failure_detector.attend(transport)
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
                with suppress(TimeoutError):  # then it is looked again whether the holder's replica is there
                    async with asyncio.timeout(min(left_s, LOOK_S)):
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
        """Return the key, unless somebody changed it the moment after."""
        entry = self._worker(job, registration)
        if entry is None:
            raise Unavailable(f"{registration.worker} was removed while it registered")
        if entry.record.boot != registration.boot:
            raise StaleIncarnation(f"{registration.worker} was replaced while it registered")
        if entry.record.served_by != self._context.instance:
            raise Unavailable(f"{registration.worker} registered at another replica meanwhile")
        return entry

    def _orphaned(self, job: str, registration: Registration) -> bool:
        """Tell whether the replica that serves the key's holder is gone."""
        entry = self._worker(job, registration)
        if entry is None:
            return False
        replicas = self._context.mirror.view.entries(self._context.keys.replicas, Replica)
        return all(replica.record.instance != entry.record.served_by for replica in replicas)

    def _worker(self, job: str, registration: Registration) -> Entry[Worker] | None:
        return self._context.job(job).worker(registration.worker)
