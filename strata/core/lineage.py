"""Which clusters are one cluster: before and after its control plane was restored (PROTOCOLS 9.1).

The uid of a restored cluster is the first one's, a dot, and random hex digits. What lies before the first dot is the
lineage: it never changes, and owns storage folders. Tokens, sessions and fences go by the whole uid.
"""

from __future__ import annotations

from typing import Final

from strata.core.ids import Uid
from strata.core.records import ClusterUid

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


def successor(uid: str, random_hex: str) -> Uid:
    """Return the uid of the cluster `uid` once it is restored."""
    return Uid(f"{lineage(uid)}.{random_hex}")


def is_restored(before: str, now: str) -> bool:
    """Return True if `now` is the uid of the cluster that had the uid `before`, restored since."""
    return before != now and lineage(before) == lineage(now)


def replacement(
    *, uid: str, revision: int, found: ClusterUid | None, at_revision: int, restoring: str = ""
) -> str:
    """Return why a replica that served `uid` up to `revision` cannot serve what etcd holds now; "" if it can.

    `found` is what etcd holds at `at_revision`, `restoring` who restores the control plane just now.
    """
    if restoring:
        return f"{RESTORING}: {restoring}"
    if found is None:
        return "etcd has lost its data"
    if found.uid == uid:
        if at_revision < revision:
            return f"etcd is at revision {at_revision}, and was at {revision}: {OLDER_SNAPSHOT}"
        return ""
    if is_restored(uid, found.uid) or uid in found.replaced:
        return ""
    return f"etcd holds another cluster, {found.uid}"
