"""Rewriting the keys of a cluster while replicas may run (PROTOCOLS 9.4).

1. One transaction puts `P/restoring` and deletes `P/uid` and `P/leader`. Replicas stop serving, and no new one
   starts. The transaction fails if etcd holds another cluster than when the restore was planned, or if a job's
   key was written since (not compared for a restore in place, see `begin`).
2. Transactions of at most 100 operations bring the keys below `P/jobs/` to their planned values. Each compares the
   mod_revision of `P/restoring`.
3. The last transaction compares that mod_revision too. It also compares that nothing below `P/jobs/` was
   written since the read that found all keys as planned. The transaction puts `P/uid`, and deletes
   `P/restoring` and `P/leader`.

An interrupted restore leaves `P/restoring`. The next restore puts that key again, which fences the interrupted
restore: the interrupted restore's transactions compare an older mod_revision. At every moment either `P/uid` or
`P/restoring` exists: if both were missing, a replica would start a new cluster.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import ClusterUid, PoisonRecord, Replica, decode, encode
from strata.core.kv.store import Store
from strata.core.kv.txn import (
    MAX_TXN_BYTES,
    Compare,
    Delete,
    KeyValue,
    Operation,
    Put,
    Range,
    Txn,
    none_newer_in,
    read_prefix,
    unchanged,
)
from strata.core.restore.lineage import lineage, successor
from strata.core.restore.records import Restoring
from strata.errors import Conflict, Refused, Unavailable

MAX_OPS: Final = 100
MAX_BYTES: Final = MAX_TXN_BYTES - (64 << 10)
ROUNDS: Final = 30
"""How many times the keys are read, because another program may have written some of them."""
TRIES: Final = 8
PAUSE_S: Final = 0.5

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyspace:
    """The keys etcd holds of one cluster at `revision`: those below `P/jobs/`, and those about the cluster itself."""

    revision: int
    jobs: Mapping[str, bytes]
    uid: ClusterUid | None
    uid_revision: int
    restoring: Restoring | None
    restoring_revision: int
    replicas: tuple[str, ...]
    backup: bytes | None


async def read_keyspace(store: Store, keys: ClusterKeys) -> Keyspace:
    """Return the keys that etcd holds of a cluster."""
    listed = await store.read(read_prefix(keys.root))
    by_key = {kv.key: kv for kv in listed.kvs}
    uid, restoring, backup = (by_key.get(key) for key in (keys.uid, keys.restoring, keys.backup))
    return Keyspace(
        revision=listed.revision,
        jobs={kv.key: kv.value for kv in listed.kvs if kv.key.startswith(keys.jobs)},
        uid=_uid(uid),
        uid_revision=uid.mod_revision if uid is not None else 0,
        restoring=_restoring(restoring),
        restoring_revision=restoring.mod_revision if restoring is not None else 0,
        replicas=tuple(_replicas(keys, listed.kvs)),
        backup=backup.value if backup is not None else None,
    )


def _uid(kv: KeyValue | None) -> ClusterUid | None:
    return decode(ClusterUid, kv.value) if kv is not None else None


def _restoring(kv: KeyValue | None) -> Restoring | None:
    """Return the restore in progress, even if its record cannot be read; None if there is none."""
    if kv is None:
        return None
    try:
        return decode(Restoring, kv.value)
    except PoisonRecord:
        return Restoring(who="somebody", since_unix_ms=0)


def _replicas(keys: ClusterKeys, kvs: Sequence[KeyValue]) -> Iterator[str]:
    for kv in kvs:
        if kv.key.startswith(keys.replicas):
            try:
                yield f"{kv.key.removeprefix(keys.replicas)} at {decode(Replica, kv.value).address}"
            except PoisonRecord:
                continue


class Rewriting:
    """One restore, from `begin` to `finish`. `me` records the restore's operator, start time and source."""

    def __init__(self, store: Store, keys: ClusterKeys, me: Restoring, *, sleep: Sleep) -> None:
        self._store = store
        self._keys = keys
        self._me = me
        self._sleep = sleep
        self._revision = 0
        """The mod_revision of `P/restoring` as this restore put it."""
        self._seen = 0
        """The revision at which all keys were as planned."""
        self._planned: Mapping[str, bytes] = {}
        self._backup: bytes | None = None

    # -- the first transaction

    async def begin(self, seen: Keyspace) -> Restoring | None:
        """Take over the keyspace; return the record of an interrupted restore that this one replaces, if any.

        `seen` is the state from which the restore was planned. `Conflict` if etcd holds another cluster by now,
        another restore has begun, or a job's key was written since (the plan would undo that write). A restore
        in place makes its plan again after `begin`, so jobs may write until then.
        """
        self._me = self._with_previous_uids(seen)
        compares = [
            unchanged(self._keys.restoring, seen.restoring_revision),
            unchanged(self._keys.uid, seen.uid_revision),
        ]
        if not self._me.in_place:
            compares.append(none_newer_in(self._keys.jobs, seen.revision))
        txn = Txn(
            compares=tuple(compares),
            success=(
                Put(key=self._keys.restoring, value=encode(self._me)),
                Delete(key=self._keys.uid),
                Delete(key=self._keys.leader),
            ),
        )
        for _ in range(TRIES):
            failed = False
            try:
                result = await self._store.execute(txn)
            except Unavailable:
                await self._sleep(PAUSE_S)
            else:
                if result.succeeded:
                    self._revision = result.revision
                    return seen.restoring
                failed = True
            held = await read_keyspace(self._store, self._keys)
            if held.restoring == self._me:  # the transaction took effect, and its answer was lost
                self._revision = held.restoring_revision
                return seen.restoring
            if failed:
                raise Conflict(
                    f"another process changed cluster {self._keys.cluster} since it was read",
                    hint="run it again",
                )
        raise Unavailable("etcd did not take the first transaction; run it again")

    def _with_previous_uids(self, held: Keyspace) -> Restoring:
        """Return the value of `P/restoring`, with the previous uids for a restore that takes over from this one."""
        old = held.restoring
        replaced = [*self._me.replaced, *(old.replaced if old is not None else ())]
        last = held.uid.uid if held.uid is not None else old.uid if old is not None else ""
        if held.uid is not None:
            replaced += held.uid.replaced
        return replace(self._me, uid=last, replaced=tuple(dict.fromkeys(replaced)))

    # -- the keys

    async def bring(self, values: Mapping[str, bytes], *, backup: bytes | None = None) -> int:
        """Make the keys below `P/jobs/` equal to `values`; return how many keys were written.

        `backup`: the value for `P/backup`, unless the key exists.
        """
        count = 0
        for _ in range(ROUNDS):
            held = await read_keyspace(self._store, self._keys)
            self._check_mine(held)
            self._planned, self._backup = values, backup if held.backup is None else None
            operations = list(differences(held.jobs, values, self._keys))
            if not operations:
                self._seen = held.revision
                return count
            for batch in batches(operations):
                await self._write(batch)
                count += len(batch)
        raise Refused(
            f"another process writes below {self._keys.jobs}",
            hint="stop the coordinators of older releases: they do not know of a restore",
        )

    async def _write(self, batch: Sequence[Operation]) -> None:
        txn = Txn(compares=(self._fence(),), success=tuple(batch))
        written = False
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            stop=stop_after_attempt(TRIES),
            wait=wait_fixed(PAUSE_S),
            sleep=self._sleep,
            reraise=True,
        ):
            with attempt:  # an attempt without an answer may have taken effect; repeating it changes nothing
                written = (await self._store.execute(txn)).succeeded
        if not written:
            self._check_mine(await read_keyspace(self._store, self._keys))
            raise Conflict("P/restoring changed and is ours: run it again")

    # -- the last transaction

    async def finish(self, uid_before: str, unix_s: int, random_hex: str) -> ClusterUid:
        """Give the cluster the uid after `uid_before`, so that replicas serve the cluster; return the uid's record."""
        new = successor(uid_before, unix_s, random_hex, replaced=(self._me.uid, *self._me.replaced))
        candidates = dict.fromkeys((*self._me.replaced, self._me.uid))
        others = tuple(uid for uid in candidates if uid and lineage(uid) != lineage(new))
        record = ClusterUid(uid=new, replaced=others)
        for _ in range(ROUNDS):
            operations: list[Operation] = [
                Put(key=self._keys.uid, value=encode(record)),
                Delete(key=self._keys.restoring),
                Delete(key=self._keys.leader),
            ]
            if self._backup is not None:
                operations.append(Put(key=self._keys.backup, value=self._backup))
            txn = Txn(
                compares=(self._fence(), none_newer_in(self._keys.jobs, self._seen)),
                success=tuple(operations),
            )
            try:
                if (await self._store.execute(txn)).succeeded:
                    return record
            except Unavailable:
                await self._sleep(PAUSE_S)
            if await self._has_uid(record):
                return record
            try:
                await self.bring(self._planned, backup=self._backup)
            except Conflict:
                if await self._has_uid(record):  # the transaction without an answer took effect only now
                    return record
                raise
        raise Unavailable("etcd did not take the last transaction; run it again")

    async def _has_uid(self, record: ClusterUid) -> bool:
        found = await self._store.read(Range(key=self._keys.uid))
        return any(_uid(kv) == record for kv in found.kvs)

    def _fence(self) -> Compare:
        assert self._revision, "begin comes first"
        return unchanged(self._keys.restoring, self._revision)

    def _check_mine(self, held: Keyspace) -> None:
        if held.restoring_revision == self._revision:
            return
        if held.restoring is None:
            raise Conflict("another restore has finished meanwhile")
        raise Conflict(
            f"another restore took over: {held.restoring}",
            hint="run one restore at a time: let that one finish",
        )


def differences(
    held: Mapping[str, bytes], wanted: Mapping[str, bytes], keys: ClusterKeys
) -> Iterator[Operation]:
    """Yield the operations that turn `held` into `wanted`: deletes first, the worlds' heads last.

    A world's head that is older than the job's phase would count as a resumed job.
    """
    for key in sorted(held.keys() - wanted.keys()):
        yield Delete(key=key)
    heads = {keys.job(name).head for name in {keys.job_of(key) for key in wanted} if name}
    changed = sorted(
        (key for key, value in wanted.items() if held.get(key) != value), key=lambda key: (key in heads, key)
    )
    for key in changed:
        yield Put(key=key, value=wanted[key])


def batches(operations: Sequence[Operation]) -> Iterator[Sequence[Operation]]:
    """Yield the operations in groups that fit into one transaction."""
    batch: list[Operation] = []
    size = 0
    for operation in operations:
        bytes_ = len(operation.key) + (len(operation.value) if isinstance(operation, Put) else 0)
        if batch and (len(batch) == MAX_OPS or size + bytes_ > MAX_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(operation)
        size += bytes_
    if batch:
        yield batch
