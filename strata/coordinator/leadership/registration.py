"""The replica's registration: its own key `P/replicas/<replica>`, alive as long as its lease is renewed.

The key shows clients and peers the address where this replica serves. The key also shows the leader that this
instance's members are not orphans. Only one instance at a time owns the replica's name. The key of an earlier run (a
*remnant*) expires with its lease within seconds. A remnant with the address that this instance has bound is deleted
immediately, since no other process can serve at that address. An instance that keeps renewing the key is another
replica of the same name: a conflict.

Nothing here waits for the view. A frozen etcd member may delay the watch for about 15 s, and the lease may expire in
that time. While the key is missing, the leader may delete this replica's members.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from strata.coordinator.view.mirror import REFUSED_S, RETRY_S, Mirror
from strata.core.ids import ReplicaId
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import Replica, encode
from strata.core.kv.store import NoSpace, Store
from strata.core.kv.txn import Decision, Delete, Put, Range, Txn, absent, unchanged
from strata.core.kv.view import View
from strata.errors import Conflict, NotFound, StrataError, Unavailable
from strata.observe import get_logger

log = get_logger()

LEASE_S: Final = 3
RENEW_S: Final = 1.0
REMNANT_S: Final = 10.0
"""Longer than any lease that a dead instance of this name may have left."""


class Registration:
    """Maintains the replica's key; `run` does the work."""

    def __init__(
        self,
        *,
        store: Store,
        mirror: Mirror,
        keys: ClusterKeys,
        replica: ReplicaId,
        record: Replica,
    ) -> None:
        self._store = store
        self._mirror = mirror
        self._key = keys.replica(replica)
        self._name = replica
        self._record = record
        self._lease = 0
        self._read_revision = 0
        """The key's revision at the last read of etcd; a view older than that revision shows an outdated key."""
        self._is_held = False
        self._was_registered = False

    @property
    def registered(self) -> bool:
        """Whether the key exists, as far as this replica knows."""
        return self._is_held and not self._is_lost(self._mirror.view)

    async def run(self) -> None:
        """Register, renew, and register again if the key is lost; until cancelled.

        `Conflict` if another instance has the name and stays alive.
        """
        while True:
            try:
                self._lease = (await self._store.grant(LEASE_S)).id
                await self._register()
                log.info("replica_registered", address=self._record.address)
                await self._renew()
                log.warning("registration_lost")
            except Conflict:
                raise
            except (Unavailable, NotFound) as error:  # NotFound: the lease expired before the write
                log.warning("registration_failed", error=error.message)
                await asyncio.sleep(REFUSED_S if isinstance(error, NoSpace) else RETRY_S)
            except StrataError as error:  # an error of one call must not end a replica that serves members
                log.warning("registration_refused", error=str(error))
                await asyncio.sleep(REFUSED_S)
            finally:
                self._is_held = False

    async def withdraw(self) -> None:
        """Remove the key with its lease. Call it after `run` has ended."""
        if self._lease:
            await self._store.revoke(self._lease)

    async def _register(self) -> None:
        """Return once the key belongs to this instance, under its current lease."""
        try:
            await self._settle()
        except Conflict:
            log.info("replica_name_held", wait_s=REMNANT_S)
            with suppress(TimeoutError):  # on a timeout the holder is alive, so its key is no remnant
                async with asyncio.timeout(REMNANT_S):
                    await self._mirror.wait_until(self._is_free)
            self._lease = (await self._store.grant(LEASE_S)).id  # the previous lease expired during the wait
            await self._settle()
        self._is_held = self._was_registered = True

    async def _settle(self) -> None:
        """Read the key and execute the transaction of `_decide` until it returns none; raise its refusal."""
        while True:
            found = await self._store.read(Range(key=self._key))
            self._read_revision = max((kv.mod_revision for kv in found.kvs), default=0)
            view = View()
            view.reset(found.revision, found.kvs)
            decision = self._decide(view)
            if decision.refusal is not None:
                raise decision.refusal
            if decision.txn is None:
                return
            await self._store.execute(decision.txn)

    async def _renew(self) -> None:
        """Return once the lease or the key is lost."""
        failing = False
        while True:
            try:
                # a failed attempt already took as long as a pause; one more attempt fits into the lease
                async with asyncio.timeout(RETRY_S if failing else RENEW_S):
                    await self._mirror.wait_until(self._is_lost)
                return
            except TimeoutError:
                pass
            try:
                await self._store.keep_alive(self._lease)
            except NotFound:
                return
            except Unavailable as error:
                if not failing:
                    log.warning("registration_not_renewed", error=error.message)
                failing = True
            else:
                failing = False

    def _is_free(self, view: View) -> bool:
        return view.revision >= self._read_revision and view.get(self._key) is None

    def _is_lost(self, view: View) -> bool:
        kv = view.get(self._key)
        return view.revision >= self._read_revision and (kv is None or kv.lease != self._lease)

    def _decide(self, view: View) -> Decision:
        entry, kv = view.entry(self._key, Replica), view.get(self._key)
        put = Put(key=self._key, value=encode(self._record), lease=self._lease)
        if entry is None or kv is None:
            return Decision(reason="the name is free", txn=Txn(compares=(absent(self._key),), success=(put,)))
        if entry.record.instance != self._record.instance:
            if entry.record.address == self._record.address and not self._was_registered:
                # Two transactions, so that this instance's key has a new create revision: the instance then
                # counts as a replica that became ready (PROTOCOLS 5.4).
                delete = Txn(
                    compares=(unchanged(self._key, kv.mod_revision),), success=(Delete(key=self._key),)
                )
                return Decision(reason="a remnant: this instance serves at its address", txn=delete)
            return Decision(
                reason="the name is taken",
                refusal=Conflict(
                    f"another replica named {self._name} runs at {entry.record.address}",
                    hint="give each replica a name of its own (--replica), or stop the other one",
                ),
            )
        if kv.lease == self._lease and entry.record == self._record:
            return Decision(reason="registered")
        return Decision(
            reason="our key is attached to an older lease",
            txn=Txn(compares=(unchanged(self._key, kv.mod_revision),), success=(put,)),
        )
