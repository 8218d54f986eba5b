"""Lineage: which cluster uids belong to one cluster, before and after restores of its control plane (PROTOCOLS 9.1).

The uid of a restored cluster has three parts, joined by dots: the first uid, the time of the restore in seconds, and
random hex digits. The part before the first dot is the *lineage*: it never changes, and storage folders belong to a
lineage. The time orders the uids of a lineage: sessions and replicas only move to a later uid. Tokens, sessions and
fences use the whole uid.

t1: a restore makes the uid L.2. t2: an operator puts an older snapshot, with the uid L, under etcd. Without the
order, replicas and members of L.2 would take L for the restored cluster, and continue with the older data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from strata.core.ids import Uid
from strata.core.kv.records import ClusterUid

WENT_BACK: Final = "etcd was restored or replaced"
"""The prefix of a suspended replica's reason."""
RESTORING: Final = "the control plane is being restored"
OLDER_SNAPSHOT: Final = "an older snapshot was put under it"
THE_WAY_BACK: Final = (
    "strata controlplane restore (with a backup, or --in-place), or strata controlplane rebuild"
)


def lineage(uid: str) -> str:
    """Return the part that all uids of one cluster have in common."""
    return uid.partition(".")[0]


def successor(uid: str, unix_s: int, random_hex: str, *, replaced: Iterable[str] = ()) -> Uid:
    """Return the uid of the cluster `uid` after a restore at the time `unix_s`.

    Whatever the clock says, the result is later than `uid` and than the uids of the same lineage in `replaced`: a
    backup may be older than an earlier restore that this restore replaces.
    """
    last = max(_number(each) for each in (uid, *replaced) if lineage(each) == lineage(uid))
    return Uid(f"{lineage(uid)}.{max(unix_s, last + 1)}.{random_hex}")


def is_restored(before: str, now: str) -> bool:
    """Return True if `now` is a later uid of the cluster that had the uid `before`."""
    return lineage(before) == lineage(now) and _number(before) < _number(now)


def _number(uid: str) -> int:
    """Return the time in a uid, in seconds, which orders its lineage; 0 before any restore."""
    number = uid.split(".")[1] if "." in uid else ""
    return int(number) if number.isdecimal() else 0


def replacement(
    *, uid: str, revision: int, found: ClusterUid | None, at_revision: int, restoring: str = ""
) -> str:
    """Return why a replica that served `uid` up to `revision` cannot serve etcd's present data; "" if it can.

    `found`: the uid that etcd holds at `at_revision`. `restoring`: the process that restores the control plane now.
    Once etcd was replaced, the same uid is never served again, even at a higher revision: other processes may have
    written to an older snapshot since, so the revision proves nothing.
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
