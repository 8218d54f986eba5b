"""`P/backup`: the record in etcd of the newest backup; it shows the backup's age without access to its place."""

from __future__ import annotations

from typing import Final

from strata.core.kv.codec import PoisonRecord, decode, encode
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.store import Store
from strata.core.kv.txn import Compare, KeyValue, Op, Put, Range, Target, Txn, unchanged
from strata.core.restore.records import Backup
from strata.errors import Refused

_ATTEMPTS: Final = 3


async def record_backup(store: Store, keys: ClusterKeys, backup: Backup, *, uid_value: bytes) -> None:
    """Write the record unless a newer backup is recorded; the transaction compares `P/uid`.

    `Refused` if the cluster is another one by now.
    """
    same_cluster = Compare(key=keys.uid, target=Target.VALUE, op=Op.EQUAL, operand=uid_value)
    for _ in range(_ATTEMPTS):
        held = await _held(store, keys.backup)
        if held is not None and _is_newer(held, backup):
            return
        before = held.mod_revision if held is not None else 0
        txn = Txn(
            compares=(same_cluster, unchanged(keys.backup, before)),
            success=(Put(key=keys.backup, value=encode(backup)),),
        )
        if (await store.execute(txn)).succeeded:
            return
        uid = await _held(store, keys.uid)
        if uid is None or uid.value != uid_value:
            raise Refused(f"etcd holds another cluster {keys.cluster} by now")
    raise Refused("other backups were recorded at the same time")


async def recorded_backup(store: Store, keys: ClusterKeys) -> Backup | None:
    """Return the record, or None if there is none; `PoisonRecord` if the key holds another value."""
    held = await _held(store, keys.backup)
    return None if held is None else decode(Backup, held.value)


async def _held(store: Store, key: str) -> KeyValue | None:
    found = await store.read(Range(key=key))
    return found.kvs[0] if found.kvs else None


def _is_newer(held: KeyValue, backup: Backup) -> bool:
    try:
        return decode(Backup, held.value).unix_ms > backup.unix_ms
    except PoisonRecord:
        return False
