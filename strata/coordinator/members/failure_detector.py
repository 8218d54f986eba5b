"""Which members reach this replica, and the death of those that no longer do (PROTOCOLS 5.2, 5.3).

A worker key that names this replica in `served_by` is *attended* while a transport of the same
boot is up here: a session, or a client's heartbeats. When it is not for `reconnect_grace`, this
replica deletes the key, comparing its mod_revision, so that a member which came back elsewhere is
never removed.

A key may also come to name this replica though its member has had no session here since: by a
registration whose client went away half way, or a hand-over that took effect after everybody had
given it up. Then no transport has failed; the member may have been served elsewhere until that very
moment, and has to find a replica again, with an etcd that is slow. It has `detect_s` for that, less the
grace.

While this replica may itself be what is wrong, nobody dies (PROTOCOLS 5.5): `core.leadership.replica_health` is asked
before each removal. While etcd cannot be reached, nobody dies either. A removal is sent only when etcd has just answered, for a
short time, and looked at again before it is repeated. One whose outcome is unknown may still take
effect when its member is back: then the member's registration writes the key once more
(`condemned`), and the late removal compares a revision that is gone.

The other way round, a transport ends when the view shows that its member is not ours any more.
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
from strata.v1.members_pb2 import MemberHeard

log = get_logger()

ATTEMPT_S: Final = 1.0
"""How long one attempt at a removal may take, before it is asked again whether it is right."""
SILENCE_LOOK_S: Final = 0.1
"""How often it is looked which transports have been silent for too long."""


class Transport(Protocol):
    """One way in which one run of a member's process reaches this replica."""

    job: str
    worker: WorkerId
    boot: BootId
    incarnation: int
    """0 until the registration is done; only then does the view's word count."""

    def dismiss(self, error: StrataError) -> None:
        """End: the member is not served by this transport any more."""
        ...

    @property
    def heard_s(self) -> float:
        """When the member last sent something, on the loop's clock."""
        ...

    def quiet_s(self) -> float:
        """Return for how long nothing shows that its member is there; 0 while a connection does."""
        ...


_Key = tuple[str, str]
"""Job and worker."""


class FailureDetector:
    """Knows the transports; finds and removes the dead. `run` owns the removals."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._transports: dict[_Key, dict[BootId, Transport]] = {}
        self._unattended_since: dict[_Key, float] = {}
        self._removals: dict[_Key, asyncio.Task[None]] = {}
        self._failed: dict[_Key, int] = {}
        """The mod_revision of a key whose member was served here, and whose transport went down."""
        self._last: dict[tuple[_Key, BootId], float] = {}
        """Whose transport went down within the last `_away_s`, and when it was last heard; in the order of the losses."""
        self._named_since: dict[_Key, tuple[int, float]] = {}
        """At which mod_revision a key names this replica, and since when that is seen."""
        self._pending_removal: dict[_Key, int] = {}
        self._changes: dict[_Key, asyncio.Event] = {}
        """What sets those going that wait for a change of a member's key or transports."""
        self._tasks: asyncio.TaskGroup | None = None
        self._stopped = False
        self._lost = context.measures.removals.child("transport_failed")

    async def run(self) -> None:
        """End the transports that have been silent for `detect_s`, and remove who is dead, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                for job in self._context.mirror.view.names(self._context.keys.jobs):
                    for worker in self._context.mirror.view.names(self._context.keys.job(job).workers):
                        self._look_guarded(job, worker)
                while True:
                    await asyncio.sleep(SILENCE_LOOK_S)
                    self._end_the_silent()
            finally:
                self._tasks = None  # nothing is begun while this ends

    def _end_the_silent(self) -> None:
        transports = [each for boots in self._transports.values() for each in boots.values()]
        for transport in transports:
            if transport.quiet_s() < self._context.timing.detect_s:
                continue
            try:
                self.lose(transport, broke=transport.incarnation > 0)
            except PoisonRecord as error:
                # Somebody wrote the member's key by hand: that must not end this replica.
                log.warning("member_unreadable", error=error.message)

    def stop(self) -> None:
        """Declare nobody dead any more: this replica is about to stop."""
        self._stopped = True

    # -- transports

    def attend(self, transport: Transport) -> None:
        """Take note of a transport that is up; an older one of the same boot is dismissed."""
        key = (transport.job, transport.worker)
        older = self._transports.setdefault(key, {}).get(transport.boot)
        self._transports[key][transport.boot] = transport
        if older is not None and older is not transport:
            if older.incarnation:
                self._note_failed(key, older.boot)
            older.dismiss(Unavailable("a newer session of the same process took over", hint=""))
        self.look(*key)

    def lose(self, transport: Transport, *, broke: bool = True) -> None:
        """Take note that a transport is down. `broke`: neither side ended it on purpose."""
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
            # a hand-over that took effect late: until then it may have given its signs elsewhere, and for
            # `detect_s` after it; it may be served, so that nobody takes its name meanwhile
            self._unattended_since[key] = named_since + 2 * timing.reconnect_grace_s
        elif transport.incarnation or silent:
            self._note_failed(key, transport.boot)
        self.look(*key)

    def find(self, job: str, worker: str, boot: str) -> Transport | None:
        """Return the transport of this boot, if it is up."""
        return self._transports.get((job, worker), {}).get(BootId(boot))

    def heard(self, job: str) -> Iterator[MemberHeard]:
        """Yield when each member of a job that is served here was last heard."""
        now_s = asyncio.get_running_loop().time()
        for worker in self._context.mirror.view.names(self._context.keys.job(job).workers):
            for transport in self._transports.get((job, worker), {}).values():
                if transport.incarnation:
                    yield MemberHeard(
                        worker_id=worker,
                        incarnation=transport.incarnation,
                        age_ms=max(0, int(1000 * (now_s - transport.heard_s))),
                    )

    def ages(self, job: str) -> Iterator[tuple[str, float]]:
        """Yield each member that this replica serves, and the seconds since it was last heard; one that is away included."""
        now_s = asyncio.get_running_loop().time()
        for entry in self._context.job(job).workers():
            if entry.record.served_by != self._context.instance:
                continue
            key, boot = (job, entry.name), entry.record.boot
            transport = self._transports.get(key, {}).get(boot)
            last_s = transport.heard_s if transport is not None else self._last.get((key, boot))
            if last_s is not None:
                yield entry.name, max(0.0, now_s - last_s)

    def hears(self, job: str, worker: str, boot: str) -> bool:
        """Tell whether this boot is at the door, registered or not, or was so lately that it may be back."""
        timing = self._context.timing
        if (transport := self.find(job, worker, boot)) is not None:
            return transport.quiet_s() < timing.orphan_s
        last_s = self._last.get(((job, worker), BootId(boot)), float("-inf"))
        return asyncio.get_running_loop().time() - last_s < self._away_s

    def failed_incarnation(self, job: str, worker: str) -> int:
        """Return the incarnation whose transport was ours and is down; 0 when there is none, or
        when that may be our own fault.
        """
        key = (job, worker)
        entry = None if self.spares() else self._unattended(key)
        if entry is None or entry.mod_revision != self._failed.get(key):
            return 0
        return entry.create_revision

    def spares(self) -> bool:
        """Whether nobody is deleted for now: what is seen here may be this replica's own fault."""
        return self._context.health.spares_s() > 0

    def pending_removal(self, job: str, worker: str) -> int:
        """Return the mod_revision at which a removal may still take effect; 0 when there is none."""
        return self._pending_removal.get((job, worker), 0)

    async def changed(self, job: str, worker: str) -> None:
        """Return when the key of this member or one of its transports changes."""
        await self._changes.setdefault((job, worker), asyncio.Event()).wait()

    def sessions(self) -> int:
        """Return how many transports are up."""
        return sum(map(len, self._transports.values()))

    # -- what the view says

    def look(self, job: str, worker: str) -> None:
        """Compare the view of one member with its transports; called whenever either changed."""
        key = (job, worker)
        if (changed := self._changes.pop(key, None)) is not None:
            changed.set()
        entry = self._context.job(job).worker(worker)
        for transport in tuple(self._transports.get(key, {}).values()):
            self._judge(transport, entry)
        if entry is None or entry.mod_revision != self._pending_removal.get(key):
            self._pending_removal.pop(key, None)
        if entry is None or entry.mod_revision != self._failed.get(key):
            self._failed.pop(key, None)
        if entry is None or entry.record.served_by != self._context.instance:
            self._named_since.pop(key, None)
        elif self._named_since.get(key, (0, 0.0))[0] != entry.mod_revision:
            self._named_since[key] = (entry.mod_revision, asyncio.get_running_loop().time())
        if self._unattended(key) is None:
            self._unattended_since.pop(key, None)
            return
        self._unattended_since.setdefault(key, asyncio.get_running_loop().time())
        if key not in self._removals and self._tasks is not None:
            self._removals[key] = self._tasks.create_task(self._remove(key), name=f"removal of {worker}")

    def _look_guarded(self, job: str, worker: str) -> None:
        try:
            self.look(job, worker)
        except PoisonRecord as error:
            log.warning("member_unreadable", job=job, worker=worker, error=error.message)

    def _judge(self, transport: Transport, entry: Entry[Worker] | None) -> None:
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

    def _unattended(self, key: _Key) -> Entry[Worker] | None:
        """Return the worker key that this replica should attend to and does not."""
        entry = None if self._stopped else self._context.job(key[0]).worker(key[1])
        if entry is None or entry.record.served_by != self._context.instance:
            return None
        return None if entry.record.boot in self._transports.get(key, {}) else entry

    async def _remove(self, key: _Key) -> None:
        """Delete the key once it was unattended for the grace; return when it no longer is."""
        job, worker = key
        try:
            while (since := self._unattended_since.get(key)) is not None:
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
            # written by hand; whoever repairs it makes us look again
            log.warning("removal_impossible", job=job, worker=worker, error=error.message)
        except Exception:
            # a bug that one member brings out must not end the replica, which serves all others
            log.exception("removal_failed", job=job, worker=worker)
        finally:
            del self._removals[key]

    def _grace_s(self, key: _Key) -> float:
        """Return how long a member may be away before it counts as dead.

        A newcomer under its name is held for `detect_s`, and must outlast it.
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
        """Return since when the key names this replica for this boot; long ago when it does not."""
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
        """How long a client that found no answer here may take until it asks here again.

        It asks all others before, and takes as long for that as the leader leaves it when its replica is gone.
        """
        return max(self._context.timing.reconnect_grace_s, self._context.timing.orphan_s)

    def _decide(self, key: _Key, view: View) -> Decision:
        job, worker = key
        entry = self._unattended(key)
        since = self._unattended_since.get(key)
        now = asyncio.get_running_loop().time()
        if entry is None or since is None or now < since + self._grace_s(key):
            return Decision(reason=f"{worker} is attended to, or was until just now, or gone")
        if self.spares():
            return Decision(reason="this replica deletes nobody for now")
        removal = decide_remove(
            JobView(view, self._context.keys.job(job)),
            WorkerId(worker),
            mod_revision=entry.mod_revision,
            reason="its transport failed"
            if key in self._failed
            else "it did not come to the replica that it was handed over to",
        )
        if removal.txn is not None:
            if self._pending_removal.get(key) != entry.mod_revision:
                self._lost.add()
            self._pending_removal[key] = entry.mod_revision
            log.info("member_lost", job=job, worker=worker, reason=removal.reason)
        return removal
