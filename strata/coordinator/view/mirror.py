"""The mirror: the replica's view of the keyspace, kept up to date by etcd's list and watch.

The mirror lists at revision R and watches from R + 1. After any end of the watch, it continues after the last
revision seen, and lists again only if that revision was compacted (PROTOCOLS 3.2). It has three further tasks:

- *Fresh.* The view does not know its own age. `fresh` reads one key linearizably, and waits until the view
  reaches the revision in the answer. Callers share one read that begins after their calls. If etcd also serves
  other programs, some revisions change no key of this cluster, and the watch does not deliver them. Then a read
  which shows that no key of this cluster changed proves that the view is fresh.
- *Audit.* Every minute a list of keys and revisions is compared with the view. A difference means that etcd or
  this process lost an event. The difference is counted, logged and repaired by a full list.
- *Behind.* `answered` returns the revision that etcd last sent in an answer to this replica, and peers report
  the revision that they have seen. A view that is behind such a revision for two seconds has a broken watch,
  whatever the cause. The mirror then opens the watch again at another endpoint.

The mirror creates the cluster's uid and watches it. If the uid changes, everything that this process knows is
about another cluster, and `run` ends with `ClusterReplaced`. After the first list the mirror logs every other
error of etcd and retries.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from strata.coordinator.measures import Measures
from strata.coordinator.view.history import History
from strata.core.ids import Uid
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import ClusterUid, PoisonRecord, decode, encode
from strata.core.kv.store import Compacted, Store
from strata.core.kv.txn import (
    KeyValue,
    Put,
    Range,
    Txn,
    WatchBatch,
    absent,
    prefix_end,
    read_prefix,
)
from strata.core.kv.view import View
from strata.core.leadership.replica_health import BEHIND_S
from strata.core.restore.lineage import RESTORING
from strata.core.restore.records import Restoring
from strata.errors import ClusterReplaced, StrataError, Unavailable
from strata.observe import get_logger

log = get_logger()

Subscriber = Callable[[WatchBatch], None]

AUDIT_S: Final = 60.0
RETRY_S: Final = 0.2
"""The pause after etcd did not answer; the store itself has tried every endpoint by then."""
REFUSED_S: Final = 1.0
"""The pause after an error other than a missing answer."""
AUDIT_WAIT_S: Final = 25.0
"""Longer than a watch may be silent before it is opened elsewhere (PROTOCOLS 3.2): a view that is behind
for less than this has lost nothing."""
POLL_S: Final = 0.25
"""How often the view is compared with the newest known revision."""
PROVE_S: Final = 1.0
"""After the view was behind for this long, the mirror checks whether the newest revisions changed only other
programs' keys."""
PROVE_LIMIT_S: Final = 1.0
"""How long that check may take; the check counts as one step of lateness."""
ASK_S: Final = 2.0
"""How often the mirror checks that etcd was not replaced (PROTOCOLS 9.1)."""
AGAIN_S: Final = 16.0
"""The shortest time between two reopenings of a late watch. In this time a faulty watch is found by its silence. More
frequent reopening would slow down further an etcd that is slow at every member."""
FOREIGN_S: Final = 0.1
"""How long an event may take before the mirror checks whether the newest revision changed only other programs' keys."""


class Mirror:
    """A `View` that follows the store. `run` feeds it; all other code reads it or waits on it.

    `uid` is empty until the first list. If it is given, no other cluster is accepted, and none is created.
    `differences` counts keys that an audit found wrong, and must stay 0. Subscribers are called synchronously, after
    the view has applied a batch, in the order of their subscription. After a list, `history.floor` is the batch's
    revision: older events are not available for client watches. `clock` also counts time in suspend.
    """

    def __init__(
        self,
        store: Store,
        keys: ClusterKeys,
        *,
        new_uid: str,
        uid: str = "",
        audit_s: float = AUDIT_S,
        ask_s: float = ASK_S,
        answered: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] | None = None,
        measures: Measures | None = None,
    ) -> None:
        measures = measures or Measures()
        self._watch_starts = measures.watch_starts.child()
        self._watch_batches = measures.watch_batches.child()
        self._watch_events = measures.watch_events.child()
        self.view = View()
        self.history = History()
        self.uid = Uid(uid)
        self.replaced: tuple[str, ...] = ()
        """The uids of the clusters that this cluster replaced (`ClusterUid.replaced`)."""
        self.waits_because = ""
        """Why this replica serves nothing yet, besides the missing first list."""
        self.differences = 0
        self._store = store
        self._keys = keys
        self._new_uid = new_uid
        self._audit_s = audit_s
        self._ask_s = ask_s
        self._answered = answered
        self._clock = clock or asyncio.get_running_loop().time
        self._peers_revision = 0
        self._target = 0
        self._behind_s = 0.0
        self._contact_at: float | None = None
        self._listed = asyncio.Event()
        self._list_requested = True
        self._following: asyncio.Timeout | None = None
        """The timeout scope of the watch; ending it makes the loop check `_list_wanted`."""
        self._known = 0
        """The newest revision whose state the view is known to equal."""
        self._subscribers: list[Subscriber] = []
        self._waiters: dict[asyncio.Future[None], Callable[[View], bool]] = {}
        self._readers: list[asyncio.Future[int]] = []
        self._reader_arrived = asyncio.Event()
        self._proving = asyncio.Lock()
        self._proofs = 0
        """The number of proofs begun."""

    # -- waiting

    async def started(self) -> None:
        """Return once the view contains a first list and the cluster's uid is known."""
        await self._listed.wait()

    async def at_least(self, revision: int) -> None:
        """Return once the view is the state as of `revision` or later. The caller sets a time limit."""
        pause_s = FOREIGN_S
        while revision > self._known:
            known = self._known
            try:
                async with asyncio.timeout(pause_s):
                    await self._reached(revision)
            except TimeoutError:
                if self._known > known:
                    continue  # the watch delivers events, only late: a list would delay them further
                pause_s = min(2.0, 2 * pause_s)
                await self._prove(revision)

    async def wait_until(self, predicate: Callable[[View], bool]) -> None:
        """Return once `predicate(view)` is true; the predicate is checked after every batch."""
        if predicate(self.view):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[future] = predicate
        try:
            await future
        finally:
            del self._waiters[future]

    async def fresh(self) -> int:
        """Bring the view to a linearizable read begun after this call; return its revision.

        `Unavailable` if etcd does not answer the read.
        """
        revision = await self.revision_of_etcd()
        await self.at_least(revision)
        return revision

    async def revision_of_etcd(self) -> int:
        """Return the revision of a linearizable read begun after this call; `Unavailable` as in `fresh`."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._readers.append(future)
        self._reader_arrived.set()
        return await future

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call `callback` with every batch from now on; return a function that ends the subscription.

        A batch without events reports only that the view reached its revision.
        """
        self._subscribers.append(callback)
        return partial(self._subscribers.remove, callback)

    # -- contact

    def note_contact(self) -> None:
        """Record that etcd has just answered."""
        self._contact_at = self._clock()

    def silence_s(self) -> float:
        """Return for how long etcd has not answered at all; infinity before its first answer."""
        if self._contact_at is None:
            return float("inf")
        return self._clock() - self._contact_at

    def note_revision(self, revision: int) -> None:
        """Record that another replica of this cluster has seen this revision."""
        self._peers_revision = max(self._peers_revision, revision)

    def behind_s(self) -> float:
        """Return for how long the view has been behind a revision that is known to exist."""
        return self._behind_s if self._target > self._known else 0.0

    # -- feeding

    async def run(self) -> None:
        """Update the view until cancelled; `ClusterReplaced` if its cluster was replaced."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="mirror-follow")
            tasks.create_task(self._serve_readers(), name="mirror-fresh")
            tasks.create_task(self._audit(), name="mirror-audit")
            tasks.create_task(self._keep_up(), name="mirror-keep-up")
            tasks.create_task(self._check_identity(), name="mirror-identity")

    async def _follow(self) -> None:
        root = self._keys.root
        while True:
            try:
                if self._list_requested:
                    await self._list()
                async with (
                    self._store.watch(
                        root, prefix_end(root), start_revision=self.view.revision + 1
                    ) as batches,
                    asyncio.timeout(None) as self._following,
                ):
                    self._watch_starts.add()
                    async for batch in batches:
                        self._watch_batches.add()
                        self._watch_events.add(len(batch.events))
                        self._take(batch)
            except Unavailable as error:
                log.warning("watch_lost", error=error.message)
                self._following = None
                await asyncio.sleep(RETRY_S)
            except Compacted as error:
                log.warning("watch_compacted", error=error.message)
                self._list_requested = True
            except TimeoutError:
                pass  # the audit requires a list, or the watch was late
            except StrataError as error:
                if isinstance(error, ClusterReplaced) or not self._listed.is_set():
                    raise  # before the first list: end the replica, which serves nothing yet, to show the reason
                log.warning("etcd_refuses", error=str(error))
                await asyncio.sleep(REFUSED_S)
                self._list_requested = True
            finally:
                self._following = None

    async def _list(self) -> None:
        """Replace the view by a new list of the keyspace; create the cluster's uid if there is none."""
        while True:
            try:
                listed = await self._store.read(read_prefix(self._keys.root))
                found = {kv.key: kv for kv in listed.kvs}
                if not self.uid and self._is_restored(found.get(self._keys.restoring)):
                    await asyncio.sleep(RETRY_S)
                    continue
                self._check_uid(found.get(self._keys.uid))
                if not self.uid:
                    await self._create_uid()
                    continue
            except (Unavailable, Compacted) as error:
                log.warning("list_failed", error=error.message)
                await asyncio.sleep(RETRY_S)
                continue
            self._check_revision(listed.revision)
            events = self.view.reset(listed.revision, listed.kvs)
            self.history.reset(listed.revision)
            self._publish(WatchBatch(revision=listed.revision, events=events))
            self._list_requested = False
            self._listed.set()
            return

    def _is_restored(self, kv: KeyValue | None) -> bool:
        """True while a restore of the control plane is in progress: until then there is nothing to serve."""
        waits = ""
        if kv is not None:
            try:
                waits = f"{RESTORING}: {decode(Restoring, kv.value)}"
            except PoisonRecord:
                waits = f"{RESTORING}: somebody began"
        if waits and waits != self.waits_because:
            log.warning("waiting_for_restore", reason=waits)
        self.waits_because = waits
        return bool(waits)

    async def _create_uid(self) -> None:
        record = encode(ClusterUid(uid=self._new_uid))
        await self._store.execute(
            Txn(
                compares=(absent(self._keys.uid), absent(self._keys.restoring)),
                success=(Put(key=self._keys.uid, value=record),),
            )
        )

    def _take(self, batch: WatchBatch) -> None:
        """Apply the events that are newer than the view."""
        self.note_contact()
        if batch.revision <= self.view.revision:
            return
        seen = self.view.revision
        events = tuple(event for event in batch.events if event.kv.mod_revision > seen)
        for event in events:
            if event.kv.key == self._keys.uid:
                self._check_uid(None if event.deleted else event.kv)
        self.view.apply(batch.revision, events)
        whole = WatchBatch(revision=batch.revision, events=events)
        self.history.append(whole)
        self._publish(whole)

    def _check_uid(self, kv: KeyValue | None) -> None:
        """Learn the uid; `ClusterReplaced` if it differs from the uid learnt before."""
        record = decode(ClusterUid, kv.value) if kv is not None else ClusterUid(uid="")
        found = Uid(record.uid)
        if self.uid and found != self.uid:
            raise ClusterReplaced(
                f"etcd no longer holds cluster {self.uid}"
                + (f", but cluster {found}" if found else ": it lost its data")
            )
        self.uid, self.replaced = found, record.replaced

    def _check_revision(self, revision: int) -> None:
        if revision < self.view.revision:
            raise ClusterReplaced(f"etcd is at revision {revision}, was at {self.view.revision}")

    def _publish(self, batch: WatchBatch) -> None:
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(batch)
            except PoisonRecord as error:
                # All replicas read a hand-written record, so the record must not end the replica.
                log.warning("poison_record", error=error.message)
        self._reach(batch.revision)

    async def _reached(self, revision: int) -> None:
        """Return once the watch, or a proof, has reached `revision`."""
        await self.wait_until(lambda _view: revision <= self._known)

    def _reach(self, revision: int) -> None:
        """Record that the view is the state as of `revision`, and wake the waiters for that."""
        self._known = max(self._known, revision)
        for future, predicate in tuple(self._waiters.items()):
            try:
                if not future.done() and predicate(self.view):
                    future.set_result(None)
            except PoisonRecord as error:
                future.set_exception(error)

    # -- fresh

    async def _serve_readers(self) -> None:
        while True:
            await self._reader_arrived.wait()
            self._reader_arrived.clear()
            readers, self._readers = self._readers, []
            try:
                answer = await self._store.read(Range(key=self._keys.uid))
                if self._listed.is_set():
                    self._check_uid(answer.kvs[0] if answer.kvs else None)
            except ClusterReplaced:
                raise
            except StrataError as error:
                for future in readers:
                    if not future.done():
                        future.set_exception(Unavailable(error.message))
                continue
            for future in readers:
                if not future.done():
                    future.set_result(answer.revision)

    async def _check_identity(self) -> None:
        """Check every `ask_s` that etcd was not replaced: after a replacement, the watch may stay silent.

        t1: etcd is restarted from an older snapshot, in which the leases are still alive.
        t2: a replica that is not the leader has nothing to read or to write; without this check it would not
            notice.
        """
        await self._listed.wait()
        while True:
            await asyncio.sleep(self._ask_s)
            with contextlib.suppress(Unavailable):
                await self.revision_of_etcd()

    async def _prove(self, revision: int) -> None:
        """Check whether the view already equals the state at `revision`, although no event arrived.

        The states are equal if no key was written after the view's revision and etcd has as many keys as the
        view: then every key of etcd is in the view, unchanged. The answer is small, however many keys etcd has.
        Since a late watch makes many callers check, all callers that arrive during one check share the next one.
        """
        before = self._proofs
        async with self._proving:
            if revision <= self._known or self._proofs > before:
                return
            self._proofs += 1
            try:
                newer = await self._store.read(_newer_than(self.view.revision, self._keys.root))
            except StrataError:
                return
            # a write that the view applied during the read would show as a newer key or a different count
            if newer.revision > self._known and not newer.kvs and newer.count == self.view.size:
                self._reach(newer.revision)

    # -- audit

    async def _audit(self) -> None:
        await self._listed.wait()
        while True:
            await asyncio.sleep(self._audit_s)
            try:
                await self.audit()
            except StrataError as error:
                log.warning("audit_failed", error=error.message)

    async def audit(self) -> int:
        """Compare the view with a list; count, log and repair differences; return their number."""
        touched: set[str] = set()
        leave = self.subscribe(lambda batch: touched.update(e.kv.key for e in batch.events))
        try:
            listed = await self._store.read(_keys_only(self._keys.root))
            # Wait until the watch has delivered that revision. If it changed no key of this cluster, the watch
            # delivers nothing; the time limit ensures that a lost event is found even then.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AUDIT_WAIT_S):
                    await self._reached(listed.revision)
        finally:
            leave()
        different = self._different(listed.kvs, touched)
        if different:
            self.differences += len(different)
            log.error(
                "view_differs_from_etcd",
                keys=different[:10],
                count=len(different),
                revision=listed.revision,
            )
            self._list_requested = True
            self._end_watch()
        return len(different)

    def _end_watch(self) -> None:
        """End the watch as too late: the next one is opened at another endpoint."""
        following, self._following = self._following, None  # once: a watch that is ending needs no second end
        if following is not None:
            following.reschedule(asyncio.get_running_loop().time())

    # -- behind

    async def _keep_up(self) -> None:
        """Measure how long the view is behind; check whether only other programs' keys changed; then reopen the
        watch.

        Each step counts at most twice its length, since this process may have been suspended.
        """
        await self._listed.wait()
        now, limit_s, is_proved = asyncio.get_running_loop().time, BEHIND_S, False
        before = now()
        while True:
            await asyncio.sleep(POLL_S)
            step_s, before = min(now() - before, 2 * POLL_S), now()
            if self._target <= self._known:
                self._target, self._behind_s = max(self._answered(), self._peers_revision), 0.0
                limit_s, is_proved = BEHIND_S, False
                continue
            self._behind_s += step_s
            if self._behind_s >= PROVE_S and not is_proved:
                is_proved = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PROVE_LIMIT_S):
                        await self._prove(self._target)
            elif self._behind_s > limit_s:
                log.warning("watch_late", behind_s=round(self._behind_s, 1), revision=self.view.revision)
                limit_s += AGAIN_S
                self._end_watch()

    def _different(self, listed: tuple[KeyValue, ...], ignored: set[str] | frozenset[str]) -> list[str]:
        there = {kv.key: kv.mod_revision for kv in listed if kv.key not in ignored}
        here = {kv.key: kv.mod_revision for kv in self.view.walk(self._keys.root) if kv.key not in ignored}
        return sorted({key for key, _ in there.items() ^ here.items()})


def _keys_only(root: str) -> Range:
    return Range(key=root, range_end=prefix_end(root), keys_only=True)


def _newer_than(revision: int, root: str) -> Range:
    """Return a read that finds one key written after `revision`, and counts all keys."""
    return replace(_keys_only(root), min_mod_revision=revision + 1, limit=1)
