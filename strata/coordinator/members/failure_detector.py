"""The failure detector: which members have a transport to this replica, and removal of the dead (PROTOCOLS 5.2, 5.3).

A transport is a session or a client's heartbeats. A worker key that names this replica in `served_by` is
*connected* while a transport of the same boot is up at this replica. If the key stays disconnected for
`reconnect_grace_s`, this replica deletes the key. The delete compares the key's mod_revision, so a member that came
back at another replica is never removed.

A key may also name this replica although its member has not connected here since the key was written. Either the
client ended its registration half way, or a hand-over took effect after all processes that took part in it had given
it up. In both cases no transport has failed. Another replica may have served the member until the key changed. The
member must then find a replica again, perhaps while etcd is slow, and has `detect_s` less the grace to do that.

While this replica itself may be at fault, it removes no member (PROTOCOLS 5.5): each removal first checks
`core.leadership.replica_health`. While etcd cannot be reached, this replica removes no member either. A removal is
sent only if etcd has just answered. It has a short deadline, and is decided again before each repetition. A removal
whose outcome is unknown may still take effect after its member is back. Therefore the member's registration writes
the key once more (`pending_removal`). The late removal then fails, because the key no longer has the revision that
the removal compares.

Conversely, a transport is dismissed once the view shows that this replica no longer serves its member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Final, Protocol

from strata.coordinator.context import ReplicaContext
from strata.coordinator.view.mirror import REFUSED_S
from strata.core.ids import BootId, WorkerId
from strata.core.job import JobView
from strata.core.kv.records import PoisonRecord, Worker
from strata.core.kv.txn import Decision
from strata.core.kv.view import Entry, View
from strata.core.members.membership import decide_remove
from strata.errors import StaleIncarnation, StrataError, Unavailable
from strata.observe import get_logger
from strata.v1.members_pb2 import MemberLastSeen

log = get_logger()

ATTEMPT_S: Final = 1.0
"""Deadline of one attempt at a removal; the next attempt decides the removal again."""
SILENCE_POLL_S: Final = 0.1
"""How often transports are checked for silence."""


class Transport(Protocol):
    """One connection between one run of a member's process and this replica."""

    job: str
    worker: WorkerId
    boot: BootId
    incarnation: int
    """0 until the registration is done; only then is the transport compared with the view."""

    def dismiss(self, error: StrataError) -> None:
        """End: this transport no longer serves the member."""
        ...

    @property
    def last_message_s(self) -> float:
        """When the member last sent a message, on the loop's clock."""
        ...

    def quiet_s(self) -> float:
        """Return for how many seconds there has been no sign of life; 0 while a connection is up."""
        ...


_Key = tuple[str, str]
"""Job and worker."""


class FailureDetector:
    """Tracks the transports, and removes dead members. `run` owns the removals."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._transports: dict[_Key, dict[BootId, Transport]] = {}
        self._disconnected_since: dict[_Key, float] = {}
        self._removals: dict[_Key, asyncio.Task[None]] = {}
        self._failed: dict[_Key, int] = {}
        """The mod_revision of each key whose member was served by this replica, and whose transport failed."""
        self._last: dict[tuple[_Key, BootId], float] = {}
        """The last sign of life on each transport that ended within the last `_away_s`, in the order in which
        they ended."""
        self._named_since: dict[_Key, tuple[int, float]] = {}
        """The mod_revision at which a key names this replica, and when this replica first saw that."""
        self._pending_removal: dict[_Key, int] = {}
        self._changes: dict[_Key, asyncio.Event] = {}
        """Events that wake the waiters for a change of a member's key or transports."""
        self._tasks: asyncio.TaskGroup | None = None
        self._stopped = False
        self._lost = context.measures.removals.child("transport_failed")

    async def run(self) -> None:
        """End transports that have been silent for `detect_s`, and remove dead members, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                for job in self._context.mirror.view.names(self._context.keys.jobs):
                    for worker in self._context.mirror.view.names(self._context.keys.job(job).workers):
                        self._check_guarded(job, worker)
                while True:
                    await asyncio.sleep(SILENCE_POLL_S)
                    self._end_silent_transports()
            finally:
                self._tasks = None  # no removal begins from here on

    def _end_silent_transports(self) -> None:
        transports = [each for boots in self._transports.values() for each in boots.values()]
        for transport in transports:
            if transport.quiet_s() < self._context.timing.detect_s:
                continue
            try:
                self.disconnected(transport, broke=transport.incarnation > 0)
            except PoisonRecord as error:
                # Somebody wrote the member's key by hand: that must not end this replica.
                log.warning("member_unreadable", error=error.message)

    def stop(self) -> None:
        """Stop removing members: this replica is about to stop."""
        self._stopped = True

    # -- transports

    def connected(self, transport: Transport) -> None:
        """Record a transport that is up; dismiss an older transport of the same boot."""
        key = (transport.job, transport.worker)
        older = self._transports.setdefault(key, {}).get(transport.boot)
        self._transports[key][transport.boot] = transport
        if older is not None and older is not transport:
            if older.incarnation:
                self._note_failed(key, older.boot)
            older.dismiss(Unavailable("a newer session of the same process took over", hint=""))
        self.look(*key)

    def disconnected(self, transport: Transport, *, broke: bool = True) -> None:
        """Record that a transport is down. `broke`: neither side ended it on purpose."""
        key = (transport.job, transport.worker)
        boots = self._transports.get(key, {})
        if boots.get(transport.boot) is not transport:
            return
        del boots[transport.boot]
        if not boots:
            del self._transports[key]
        if broke and not self._stopped:
            self._context.health.lost(left=self.sessions())
        self._note_last(key, transport)
        now, timing = asyncio.get_running_loop().time(), self._context.timing
        silent = transport.quiet_s() >= timing.detect_s
        named_since = self._named_since_s(key, transport.boot)
        if silent and not transport.incarnation and now < named_since + timing.detect_s:
            # The hand-over took effect late. The member may have sent heartbeats to another replica until then,
            # and that replica may serve it for `detect_s` more. Until then, no other process may take the
            # member's name.
            self._disconnected_since[key] = named_since + 2 * timing.reconnect_grace_s
        elif transport.incarnation or silent:
            self._note_failed(key, transport.boot)
        self.look(*key)

    def find(self, job: str, worker: str, boot: str) -> Transport | None:
        """Return the transport of this boot, or None if it is not up."""
        return self._transports.get((job, worker), {}).get(BootId(boot))

    def last_seen(self, job: str) -> Iterator[MemberLastSeen]:
        """Yield, for each member of a job with a transport here, the time since it was last seen."""
        now_s = asyncio.get_running_loop().time()
        for worker in self._context.mirror.view.names(self._context.keys.job(job).workers):
            for transport in self._transports.get((job, worker), {}).values():
                if transport.incarnation:
                    yield MemberLastSeen(
                        worker_id=worker,
                        incarnation=transport.incarnation,
                        age_ms=max(0, int(1000 * (now_s - transport.last_message_s))),
                    )

    def ages(self, job: str) -> Iterator[tuple[str, float]]:
        """Yield each member that this replica serves, even if disconnected, and the seconds since it was last seen."""
        now_s = asyncio.get_running_loop().time()
        for entry in self._context.job(job).workers():
            if entry.record.served_by != self._context.instance:
                continue
            key, boot = (job, entry.name), entry.record.boot
            transport = self._transports.get(key, {}).get(boot)
            last_s = transport.last_message_s if transport is not None else self._last.get((key, boot))
            if last_s is not None:
                yield entry.name, max(0.0, now_s - last_s)

    def has_recent_transport(self, job: str, worker: str, boot: str) -> bool:
        """True if this boot has a transport here, registered or not, or had one so recently that it may reconnect."""
        timing = self._context.timing
        if (transport := self.find(job, worker, boot)) is not None:
            return transport.quiet_s() < timing.orphan_s
        last_s = self._last.get(((job, worker), BootId(boot)), float("-inf"))
        return asyncio.get_running_loop().time() - last_s < self._away_s

    def failed_incarnation(self, job: str, worker: str) -> int:
        """Return the incarnation whose transport was here and is down; 0 if there is none, or if this replica
        itself may have caused the loss.
        """
        key = (job, worker)
        entry = None if self.spares() else self._disconnected(key)
        if entry is None or entry.mod_revision != self._failed.get(key):
            return 0
        return entry.create_revision

    def spares(self) -> bool:
        """True while this replica deletes nobody: the failures that it sees may be its own fault."""
        return self._context.health.spares_s() > 0

    def pending_removal(self, job: str, worker: str) -> int:
        """Return the mod_revision at which a removal may still take effect; 0 if there is none."""
        return self._pending_removal.get((job, worker), 0)

    async def changed(self, job: str, worker: str) -> None:
        """Return when the key of this member or one of its transports changes."""
        await self._changes.setdefault((job, worker), asyncio.Event()).wait()

    def sessions(self) -> int:
        """Return the number of transports that are up."""
        return sum(map(len, self._transports.values()))

    # -- the view

    def look(self, job: str, worker: str) -> None:
        """Compare the view of one member with its transports; called whenever either changes."""
        key = (job, worker)
        if (changed := self._changes.pop(key, None)) is not None:
            changed.set()
        entry = self._context.job(job).worker(worker)
        for transport in tuple(self._transports.get(key, {}).values()):
            self._dismiss_if_replaced(transport, entry)
        if entry is None or entry.mod_revision != self._pending_removal.get(key):
            self._pending_removal.pop(key, None)
        if entry is None or entry.mod_revision != self._failed.get(key):
            self._failed.pop(key, None)
        if entry is None or entry.record.served_by != self._context.instance:
            self._named_since.pop(key, None)
        elif self._named_since.get(key, (0, 0.0))[0] != entry.mod_revision:
            self._named_since[key] = (entry.mod_revision, asyncio.get_running_loop().time())
        if self._disconnected(key) is None:
            self._disconnected_since.pop(key, None)
            return
        self._disconnected_since.setdefault(key, asyncio.get_running_loop().time())
        if key not in self._removals and self._tasks is not None:
            self._removals[key] = self._tasks.create_task(self._remove(key), name=f"removal of {worker}")

    def _check_guarded(self, job: str, worker: str) -> None:
        try:
            self.look(job, worker)
        except PoisonRecord as error:
            log.warning("member_unreadable", job=job, worker=worker, error=error.message)

    def _dismiss_if_replaced(self, transport: Transport, entry: Entry[Worker] | None) -> None:
        if not transport.incarnation:
            return
        if entry is None:
            transport.dismiss(
                Unavailable(f"{transport.worker} was declared dead", hint="it may register again")
            )
        elif entry.record.boot != transport.boot:
            transport.dismiss(
                StaleIncarnation(
                    f"{transport.worker} was incarnation {transport.incarnation} and has been replaced"
                    f" by {entry.create_revision} ({entry.record.host}:{entry.record.pid})"
                )
            )
        elif entry.record.served_by != self._context.instance:
            transport.dismiss(Unavailable(f"{transport.worker} was handed over to another replica", hint=""))

    def _disconnected(self, key: _Key) -> Entry[Worker] | None:
        """Return the worker key that names this replica and has no transport here, or None."""
        entry = None if self._stopped else self._context.job(key[0]).worker(key[1])
        if entry is None or entry.record.served_by != self._context.instance:
            return None
        return None if entry.record.boot in self._transports.get(key, {}) else entry

    async def _remove(self, key: _Key) -> None:
        """Delete the key once it was disconnected for its grace; return once it is no longer disconnected."""
        job, worker = key
        try:
            while (since := self._disconnected_since.get(key)) is not None:
                grace_left_s = since + self._grace_s(key) - asyncio.get_running_loop().time()
                wait_s = max(grace_left_s, self._context.health.spares_s())
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                    continue
                try:
                    await self._context.mirror.fresh()
                    await self._context.executor.settle(
                        partial(self._decide, key), deadline_s=ATTEMPT_S, coalesce=True
                    )
                except PoisonRecord:
                    raise
                except StrataError as error:
                    log.warning("removal_delayed", job=job, worker=worker, error=error.message)
                    if not isinstance(error, Unavailable):
                        await asyncio.sleep(REFUSED_S)
                self.look(job, worker)
        except PoisonRecord as error:
            # a hand-written record; when it is repaired, the key changes, and `look` runs again
            log.warning("removal_impossible", job=job, worker=worker, error=error.message)
        except Exception:
            # a bug that one member's record triggers must not end the replica, which serves all others
            log.exception("removal_failed", job=job, worker=worker)
        finally:
            del self._removals[key]

    def _grace_s(self, key: _Key) -> float:
        """Return how long a member may be disconnected before this replica removes it as dead.

        A newcomer under the same name waits `detect_s`, which must be longer than this grace.
        """
        timing = self._context.timing
        return timing.reconnect_grace_s if key in self._failed else timing.detect_s - timing.reconnect_grace_s

    def _note_failed(self, key: _Key, boot: BootId) -> None:
        entry = self._context.job(key[0]).worker(key[1])
        if (
            entry is not None
            and entry.record.boot == boot
            and entry.record.served_by == self._context.instance
        ):
            self._failed[key] = entry.mod_revision

    def _named_since_s(self, key: _Key, boot: BootId) -> float:
        """Return when the key began to name this replica for this boot; -inf if the key does not name it."""
        entry, named = self._context.job(key[0]).worker(key[1]), self._named_since.get(key)
        if entry is None or named is None or entry.record.boot != boot or entry.mod_revision != named[0]:
            return float("-inf")
        return named[1]

    def _note_last(self, key: _Key, transport: Transport) -> None:
        now, run = asyncio.get_running_loop().time(), (key, transport.boot)
        self._last.pop(run, None)
        self._last[run] = now - transport.quiet_s()
        while self._last and (oldest := next(iter(self._last.items())))[1] < now - self._away_s:
            del self._last[oldest[0]]

    @property
    def _away_s(self) -> float:
        """How long a client without an answer from this replica may take until it calls this replica again.

        The client calls all other replicas first. The leader allows a member the same time after the loss of
        its replica.
        """
        return max(self._context.timing.reconnect_grace_s, self._context.timing.orphan_s)

    def _decide(self, key: _Key, view: View) -> Decision:
        job, worker = key
        entry = self._disconnected(key)
        since = self._disconnected_since.get(key)
        now = asyncio.get_running_loop().time()
        if entry is None or since is None or now < since + self._grace_s(key):
            return Decision(reason=f"{worker} is connected, or was until just now, or is removed")
        if self.spares():
            return Decision(reason="this replica removes no members for now")
        removal = decide_remove(
            JobView(view, self._context.keys.job(job)),
            WorkerId(worker),
            mod_revision=entry.mod_revision,
            reason="its transport failed"
            if key in self._failed
            else "it did not connect to the replica that it was handed over to",
        )
        if removal.txn is not None:
            if self._pending_removal.get(key) != entry.mod_revision:
                self._lost.add()
            self._pending_removal[key] = entry.mod_revision
            log.info("member_lost", job=job, worker=worker, reason=removal.reason)
        return removal
