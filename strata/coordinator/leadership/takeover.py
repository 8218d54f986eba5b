"""Takeover from a dead leader: carries out the decisions of `core.leadership.takeover`.

The links to the other replicas report every handshake and every end of a link to this module. This module
investigates one *case* at a time: a leader whose link broke. Deleting the leader's key wakes every election.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from strata.coordinator.view.mirror import Mirror
from strata.core.ids import InstanceId
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import Leader
from strata.core.kv.store import Store
from strata.core.kv.view import Entry
from strata.core.leadership.leader import resign_txn
from strata.core.leadership.takeover import (
    PROBE_EVERY_S,
    REFUSALS,
    Act,
    Memory,
    Probe,
    Verdict,
    probed,
    suspect,
)
from strata.errors import StrataError, Unavailable
from strata.observe import get_logger

log = get_logger()

Prober = Callable[[str], Awaitable[Probe]]
"""Connects to `host:port` once and returns the result within about a second; raises nothing."""

ATTEMPTS: Final = 5
RETRY_S: Final = 0.1


class Deposition:
    """One replica's knowledge of its links to leaders. `run` acts on it until cancelled."""

    def __init__(
        self,
        *,
        store: Store,
        mirror: Mirror,
        keys: ClusterKeys,
        probe: Prober,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._mirror = mirror
        self._keys = keys
        self._probe = probe
        self._clock = clock
        self._memory = Memory()
        self._linked: set[InstanceId] = set()
        self._cases: asyncio.Queue[Entry[Leader]] = asyncio.Queue()

    def met(self, instance: InstanceId) -> None:
        """Record that this instance completed a handshake, on a link that either side opened."""
        before = self._memory
        self._memory = before.met(instance, self._clock())
        if self._memory is not before:
            log.warning("deposed_leader_alive", instance=instance)

    def linked(self, instance: InstanceId) -> None:
        """Record that this replica's link to the instance is up: the instance completed a handshake."""
        self._linked.add(instance)
        self.met(instance)

    def unlinked(self, instance: InstanceId, *, broke: bool) -> None:
        """Record that this replica's link to the instance is down. `broke`: the peer closed or reset the link.

        Silence, or an error that shows nothing about the other process, opens no case.
        """
        self._linked.discard(instance)
        view, now_s = self._mirror.view, self._clock()
        case = suspect(instance, view, self._keys, self._memory, now_s=now_s) if broke else None
        if case is not None:
            self._cases.put_nowait(case)

    async def run(self) -> None:
        """Investigate every case, until cancelled."""
        while True:
            await self._investigate(await self._cases.get())

    async def _investigate(self, case: Entry[Leader]) -> None:
        log.info("leader_link_broke", epoch=case.create_revision, address=case.record.address)
        verdict = await self._probed(case)
        log.info("leader_probed", epoch=case.create_revision, act=verdict.act.value, reason=verdict.reason)
        if verdict.act is Act.DEPOSE:
            await self._depose(case)

    async def _probed(self, case: Entry[Leader]) -> Verdict:
        """Probe until a verdict is reached."""
        probes: list[Probe] = []
        while True:
            probes.append(await self._probe(case.record.address))
            verdict = self._verdict(case, probes)
            if verdict.act is not Act.PROBE:
                return verdict
            await asyncio.sleep(PROBE_EVERY_S)

    def _verdict(self, case: Entry[Leader], probes: Sequence[Probe]) -> Verdict:
        return probed(
            case,
            probes,
            self._mirror.view,
            self._keys,
            self._memory,
            linked=case.record.instance in self._linked,
            now_s=self._clock(),
        )

    async def _depose(self, case: Entry[Leader]) -> None:
        """Delete the leader key of that epoch. If the outcome is unknown, retry while the leader still seems dead.

        If etcd stays silent for longer, the leader's lease expires, which ends the epoch.
        """
        self._memory = self._memory.has_deposed(case.record.instance)
        for _attempt in range(ATTEMPTS):
            try:
                result = await self._store.execute(resign_txn(self._keys, case.create_revision))
            except Unavailable as error:
                log.info("deposition_retries", epoch=case.create_revision, error=error.message)
                await asyncio.sleep(RETRY_S)
                verdict = self._verdict(case, [Probe.REFUSED] * REFUSALS)
                if verdict.act is not Act.DEPOSE:
                    log.info("deposition_given_up", epoch=case.create_revision, reason=verdict.reason)
                    return
            except StrataError as error:
                log.warning("deposition_refused", epoch=case.create_revision, error=str(error))
                return
            else:
                log.warning("leader_deposed", epoch=case.create_revision, by_this_replica=result.succeeded)
                return
