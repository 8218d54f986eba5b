"""Which clusters are one cluster: before and after its control plane was restored (PROTOCOLS 9.1).

The uid of a restored cluster is the first one's, a dot, the time of the restore in seconds, a dot, and random hex digits. What
lies before the first dot is the lineage: it never changes, and owns storage folders. The time orders the uids of a lineage: a
session, or a replica, moves forwards only. Tokens, sessions and fences go by the whole uid.

t1: a restore makes L.2. t2: somebody puts a snapshot from before under etcd; its uid is L. Without the order, replicas and
members of L.2 would take L for the restored cluster, and go on in the past.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from strata.core.ids import Uid
from strata.core.kv.records import ClusterUid

WENT_BACK: Final = "etcd was restored or replaced"
"""How a suspended replica begins its reason."""
RESTORING: Final = "the control plane is being restored"
OLDER_SNAPSHOT: Final = "an older snapshot was put under it"
THE_WAY_BACK: Final = (
    "strata controlplane restore (with a backup, or --in-place), or strata controlplane rebuild"
)


def lineage(uid: str) -> str:
    """Return what all uids of one cluster have in common."""
    return uid.partition(".")[0]


def successor(uid: str, unix_s: int, random_hex: str, *, replaced: Iterable[str] = ()) -> Uid:
    """Return the uid of the cluster `uid` once it is restored, at the time `unix_s`.

    It follows `uid`, and those of the same lineage in `replaced`, whatever the clock says: a backup may be older than a restore
    whose place this one takes.
    """
    last = max(_number(each) for each in (uid, *replaced) if lineage(each) == lineage(uid))
    return Uid(f"{lineage(uid)}.{max(unix_s, last + 1)}.{random_hex}")


def is_restored(before: str, now: str) -> bool:
    """Return True if `now` is the uid of the cluster that had the uid `before`, restored since."""
    return lineage(before) == lineage(now) and _number(before) < _number(now)


def _number(uid: str) -> int:
    """Return which restore of its lineage made a uid; 0: none did."""
    number = uid.split(".")[1] if "." in uid else ""
    return int(number) if number.isdecimal() else 0


def replacement(
    *, uid: str, revision: int, found: ClusterUid | None, at_revision: int, restoring: str = ""
) -> str:
    """Return why a replica that served `uid` up to `revision` cannot serve what etcd holds now; "" if it can.

    `found` is what etcd holds at `at_revision`, `restoring` who restores the control plane just now. The same uid is never served
    again: others may have written since an older snapshot was put under etcd, so its revision proves nothing.
    """
    if restoring:
        return f"{RESTORING}: {restoring}"
    if found is None:
        return "etcd has lost its data"
    if is_restored(uid, found.uid) or uid in found.replaced:
        return ""
    if found.uid == uid:
        if at_revision < revision:
            return f"etcd is at revision {at_revision}, and was at {revision}: {OLDER_SNAPSHOT}"
        return f"etcd holds the cluster again, but may have lost some of it: {OLDER_SNAPSHOT}, or an endpoint had pointed elsewhere"
    if lineage(uid) == lineage(found.uid):
        return f"etcd holds this cluster as it was before a restore: {OLDER_SNAPSHOT}"
    return f"etcd holds another cluster, {found.uid}"
