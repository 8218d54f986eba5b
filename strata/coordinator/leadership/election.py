"""Leader election: carries out the steps of `core.leadership.leader`, and publishes the epoch inside the replica.

That pure module decides every step from (leader state, view, time). This module does the I/O: the lease and its
renewal on a store handle of their own, the campaign, the confirmation, the guarded delete. Code that acts as the
leader reads `epoch` before each act; each read of `epoch` reads the clock again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from strata.coordinator.leadership.controller_watchdog import ControllerWatchdog
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Executor
from strata.core.ids import Epoch, InstanceId, ReplicaId
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.store import Store
from strata.core.kv.txn import Range, Txn, WatchBatch
from strata.core.leadership.leader import (
    REQUESTED_TTL_S,
    Act,
    LeaderState,
    Step,
    campaign_txn,
    leader_of,
    next_step,
    resign_txn,
)
from strata.errors import NotFound, StrataError, Unavailable
from strata.observe import get_logger

log = get_logger()

RETRY_S: Final = 0.1
REFUSED_S: Final = 1.0
"""The pause after an error that does not resolve by itself."""


class Election:
    """The participation of one instance in the election. `run` campaigns and renews until cancelled.

    `renewals` is the store handle for leases, so that no other request queues before a renewal.
    `clock` also counts time in suspend (CLOCK_BOOTTIME).
    """

    def __init__(
        self,
        *,
        renewals: Store,
        mirror: Mirror,
        executor: Executor,
        keys: ClusterKeys,
        instance: InstanceId,
        replica: ReplicaId,
        heartbeat: ControllerWatchdog,
        clock: Callable[[], float],
    ) -> None:
        self._renewals = renewals
        self._mirror = mirror
        self._executor = executor
        self._keys = keys
        self._replica = replica
        self._heartbeat = heartbeat
        self._clock = clock
        self._leader_state = LeaderState(instance=instance)
        self._wake = asyncio.Event()
        self._term_changed = asyncio.Event()

    @property
    def epoch(self) -> Epoch | None:
        """The epoch in which this replica may act as leader at this moment, or None."""
        leader_state = self._leader_state
        return leader_state.epoch if leader_state.may_act(self._clock()) else None

    async def elected(self) -> Epoch:
        """Return the epoch once this replica leads."""
        while (epoch := self._leader_state.epoch) is None:
            await self._term_changed.wait()
        return epoch

    async def ended(self, epoch: Epoch) -> None:
        """Return once the leadership of `epoch` has ended."""
        while self._leader_state.epoch == epoch:
            await self._term_changed.wait()

    def deposed(self, epoch: Epoch, reason: str) -> None:
        """End the leadership of `epoch` immediately, if `epoch` is the current one."""
        if self._leader_state.epoch == epoch:
            self._stop(reason)
            self._wake.set()

    async def resign(self) -> None:
        """Stop leading and delete this instance's leader key, if there is one, so that another replica can lead.

        Revoke the lease too: a campaign still in flight must not win for a replica that has stopped.
        Call this after `run` has ended. The caller sets the time limit, since etcd may be unreachable.
        """
        lease = self._leader_state.lease
        if self._leader_state.epoch is not None:
            self._leave("it resigned", log.info)
        held = leader_of(self._mirror.view, self._keys)
        self._leader_state = self._leader_state.stopped()
        async with asyncio.TaskGroup() as tasks:  # concurrently: either may wait forever
            if held is not None and held.record.instance == self._leader_state.instance:
                delete = resign_txn(self._keys, held.create_revision)
                tasks.create_task(self._log_failure(self._executor.execute(delete)), name="resignation")
            if lease is not None:
                tasks.create_task(
                    self._log_failure(self._renewals.revoke(lease.lease_id)), name="lease's end"
                )

    async def _log_failure(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except StrataError as error:  # then the lease expires
            log.warning("resignation_failed", error=str(error))

    async def run(self, *, address: str) -> None:
        """Campaign whenever there is no leader, and renew while leading; until cancelled.

        Start it once this replica serves at `address`.
        """

        def look(batch: WatchBatch) -> None:
            if any(event.kv.key == self._keys.leader for event in batch.events):
                self._wake.set()

        leave = self._mirror.subscribe(look)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._wake.clear()
                    try:
                        await self._perform(self._next(), address, tasks)
                    except Unavailable as error:
                        log.debug("election_retries", error=error.message)
                        await self._pause(RETRY_S)
                    except StrataError as error:
                        # A hand-written leader key, or a password or certificate that etcd no longer accepts: an
                        # operator can repair each. Ending this replica would help nobody: its members need no leader.
                        log.warning("election_refused", error=str(error))
                        await self._pause(REFUSED_S)
        finally:
            leave()

    # -- I/O

    def _next(self) -> Step:
        return next_step(
            self._leader_state,
            self._mirror.view,
            self._keys,
            now_s=self._clock(),
            turned_s=self._heartbeat.turned_s,
        )

    async def _perform(self, step: Step, address: str, tasks: asyncio.TaskGroup) -> None:
        leader_state = self._leader_state
        match step.act:
            case Act.WAIT:
                await self._pause(None if step.until_s is None else step.until_s - self._clock())
            case Act.GRANT:
                sent_s = self._clock()
                lease = await self._renewals.grant(REQUESTED_TTL_S)
                self._leader_state = leader_state.granted(lease.id, lease.ttl_s, sent_s=sent_s)
            case Act.CAMPAIGN:
                assert leader_state.lease is not None
                txn = campaign_txn(
                    self._keys,
                    instance=leader_state.instance,
                    replica=self._replica,
                    address=address,
                    lease_id=leader_state.lease.lease_id,
                )
                await self._submit(txn)
            case Act.TAKE_LEAD:
                assert step.epoch is not None
                await self._take_lead(step.epoch)
            case Act.RENEW:
                self._leader_state = leader_state.sending(self._clock())
                tasks.create_task(self._renew(), name="election-renew")
            case Act.DELETE_OWN:
                assert step.epoch is not None
                await self._submit(resign_txn(self._keys, step.epoch))
            case Act.STOP:
                self._stop(step.reason)

    async def _submit(self, txn: Txn) -> None:
        """Execute once and wait until the view shows the outcome. If the outcome is unknown, the next step finds
        it in the view.
        """
        try:
            result = await self._renewals.execute(txn)
        except NotFound:  # the lease expired while the request was in flight
            self._leader_state = self._leader_state.stopped()
        else:
            await self._mirror.at_least(result.revision)

    async def _pause(self, limit_s: float | None) -> None:
        """Return after `limit_s`, or when the leader key or the leader state changes."""
        with suppress(TimeoutError):
            # The election's clock may be slightly ahead of the loop's: the minimum prevents a busy loop.
            async with asyncio.timeout(None if limit_s is None else max(limit_s, 0.001)):
                await self._wake.wait()

    async def _take_lead(self, epoch: Epoch) -> None:
        """Confirm the key by a linearizable read, bring the view to its revision, begin to lead (PROTOCOLS 4.3)."""
        answer = await self._renewals.read(Range(key=self._keys.leader))
        await self._mirror.at_least(answer.revision)
        (held,) = answer.kvs or (None,)
        if held is None or held.create_revision != epoch:
            return  # the view already shows a newer state
        lease = self._leader_state.lease
        if lease is None or not lease.may_act(self._clock()):
            return
        self._heartbeat.beat()
        self._leader_state = self._leader_state.took_lead(epoch)
        log.info("leadership_taken", epoch=epoch)
        self._announce()

    async def _renew(self) -> None:
        """Send one keepalive. Its answer moves the deadline if this replica still leads under the same lease.

        Also read the leader key. A slow or broken watch may hide that the key was deleted, and etcd may
        renew a lease whose key is deleted (PROTOCOLS 4.5).
        """
        lease, epoch = self._leader_state.lease, self._leader_state.epoch
        assert lease is not None
        ttl_s: float | None = None
        held = True
        try:
            granted_s = await self._renewals.keep_alive(lease.lease_id)
            answer = await self._renewals.read(Range(key=self._keys.leader))
            held = any(kv.create_revision == epoch for kv in answer.kvs)
            ttl_s = granted_s
        except NotFound:
            ttl_s = 0
        except StrataError as error:  # retried like any other until the lease expires (PROTOCOLS 4.5)
            log.warning("leadership_not_renewed", error=str(error))
        if self._leader_state.lease == lease:  # otherwise this leadership ended during the keepalive
            if not held:
                self._stop(f"etcd no longer has the leader key of epoch {epoch}")
            else:
                self._leader_state = self._leader_state.answered(ttl_s)
            self._wake.set()

    def _stop(self, reason: str) -> None:
        self._leave(reason, log.warning)

    def _leave(self, reason: str, log_line: Callable[..., object]) -> None:
        epoch = self._leader_state.epoch
        self._leader_state = self._leader_state.stopped()
        log_line("leadership_ended", epoch=epoch, reason=reason)
        self._announce()

    def _announce(self) -> None:
        changed, self._term_changed = self._term_changed, asyncio.Event()
        changed.set()
