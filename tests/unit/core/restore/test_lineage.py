"""Lineage of cluster uids: which clusters are one, and when a replica may serve again."""

from __future__ import annotations

import pytest

from strata.core.ids import Uid
from strata.core.kv.records import ClusterUid, decode, encode
from strata.core.restore.lineage import is_restored, lineage, replacement, successor
from strata.core.restore.records import Restoring


def test_a_lineage_outlives_every_restore() -> None:
    first = Uid("0b6f")
    second = successor(first, 1_764_300_000, "77aa")
    third = successor(second, 1_764_300_000, "99bb")
    assert (second, third) == ("0b6f.1764300000.77aa", "0b6f.1764300001.99bb"), (
        "a clock that stands is no obstacle"
    )
    assert lineage(first) == lineage(second) == lineage(third) == "0b6f"
    assert is_restored(first, second)
    assert is_restored(second, third)
    assert is_restored(first, third)
    assert not is_restored(first, "1c70.1764300000.77aa")
    assert not is_restored(first, "0b6f7.1764300000.77aa")


def test_a_successor_uid_also_follows_the_cluster_it_replaces() -> None:
    """t1: a restore from a backup. t2: another restore from it, in the same second or by a clock that lags."""
    first = successor("0b6f", 50, "11")
    again = successor("0b6f", 49, "22", replaced=(first,))
    assert is_restored(first, again)
    assert successor("0b6f", 49, "22", replaced=("1c70.99.33",)) == "0b6f.49.22"
    assert is_restored("0b6f.60.11", successor("0b6f", 49, "22", replaced=("1c70", "0b6f.60.11")))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("0b6f.5.77aa", "0b6f.5.77aa"),
        ("0b6f.5.77aa", "0b6f"),
        ("0b6f.5.77aa", "0b6f.4.99bb"),
        ("0b6f.5.77aa", "0b6f.5.99bb"),
        ("0b6f.x.77aa", "0b6f"),
    ],
)
def test_an_older_uid_of_a_lineage_is_not_its_restored_cluster(before: str, now: str) -> None:
    assert not is_restored(before, now)


SERVED = {"uid": "0b6f.4.11", "revision": 100}


@pytest.mark.parametrize(
    ("found", "at_revision", "why"),
    [
        (ClusterUid(uid="0b6f.4.11"), 100, "may have lost some of it"),
        (ClusterUid(uid="0b6f.4.11"), 99, "older snapshot"),
        (ClusterUid(uid="0b6f"), 500, "as it was before a restore"),
        (ClusterUid(uid="0b6f.5.77"), 12, ""),
        (ClusterUid(uid="1c70"), 500, "holds another cluster, 1c70"),
        (ClusterUid(uid="1c70", replaced=("aaaa", "0b6f.4.11")), 500, ""),
        (None, 3, "lost its data"),
    ],
    ids=[
        "written on since",
        "an older snapshot",
        "a snapshot from before a restore",
        "restored",
        "a stranger",
        "took our place",
        "wiped",
    ],
)
def test_a_replica_detects_whether_etcd_still_holds_its_cluster(
    found: ClusterUid | None, at_revision: int, why: str
) -> None:
    reason = replacement(found=found, at_revision=at_revision, **SERVED)  # type: ignore[arg-type]  # by name
    assert (why in reason) if why else (reason == "")


def test_no_replica_serves_during_a_control_plane_restore() -> None:
    at_work = str(Restoring(who="ada@ops", since_unix_ms=1, source="strata-default.db"))
    reason = replacement(
        uid="0b6f", revision=1, found=ClusterUid(uid="0b6f.5.77"), at_revision=5, restoring=at_work
    )
    assert reason == "the control plane is being restored: ada@ops began, from strata-default.db"


def test_a_uid_record_of_an_older_version_replaces_no_cluster() -> None:
    assert decode(ClusterUid, b'{"v":1,"uid":"0b6f"}') == ClusterUid(uid="0b6f")
    both = ClusterUid(uid="a", replaced=("b",))
    assert decode(ClusterUid, encode(both)) == both
