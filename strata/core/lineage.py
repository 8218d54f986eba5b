"""A cluster that is restored, or built anew from its storage, is another one of the same *lineage*.

The uid of a cluster after a restore is `<first uid>.<random hex>`. The part before the first dot is the
lineage: it never changes, so storage roots stay the cluster's own. All else goes by the whole uid, so that
whatever was issued before the restore (tokens, sessions, fences) is recognised as of another cluster.
"""

from __future__ import annotations

from strata.core.ids import Uid, checked_id


def lineage(uid: str) -> str:
    """Return what a uid has in common with those before and after a restore."""
    return uid.partition(".")[0]


def successor(uid: str, chance: str) -> Uid:
    """Return the uid of the cluster that follows that of `uid`; `chance` is random, in hexadecimal."""
    return Uid(checked_id("cluster's data", f"{lineage(uid)}.{chance}"))
