"""Which clusters are one cluster, and when a replica may serve again."""

from __future__ import annotations

import pytest

from strata.core.ids import Uid
from strata.core.lineage import is_restored, lineage, replacement, successor
from strata.core.records import ClusterUid, decode, encode
from strata.core.restoring_record import Restoring


def test_a_lineage_outlives_every_restore() -> None:
    first = Uid("0b6f")
    second = successor(first, "77aa")
    third = successor(second, "99bb")
    assert (second, third) == ("0b6f.77aa", "0b6f.99bb")
    assert lineage(first) == lineage(second) == lineage(third) == "0b6f"
    assert is_restored(first, second)
    assert is_restored(second, third)
    assert not is_restored(second, second)
    assert not is_restored(first, "1c70")
    assert not is_restored(first, "0b6f7")


SERVED = {"uid": "0b6f", "revision": 100}


@pytest.mark.parametrize(
    ("found", "at_revision", "why"),
    [
        (ClusterUid(uid="0b6f"), 100, ""),
        (ClusterUid(uid="0b6f"), 99, "older snapshot"),
        (ClusterUid(uid="0b6f.77aa"), 12, ""),
        (ClusterUid(uid="1c70"), 500, "holds another cluster, 1c70"),
        (ClusterUid(uid="1c70", replaced=("aaaa", "0b6f")), 500, ""),
        (None, 3, "lost its data"),
    ],
    ids=["as it was", "an older snapshot", "restored", "a stranger", "took our place", "wiped"],
)
def test_what_a_replica_makes_of_the_etcd_that_it_finds(
    found: ClusterUid | None, at_revision: int, why: str
) -> None:
    said = replacement(found=found, at_revision=at_revision, **SERVED)  # type: ignore[arg-type]  # by name
    assert (why in said) if why else (said == "")


def test_nobody_serves_while_the_control_plane_is_restored() -> None:
    at_work = str(Restoring(who="ada@ops", since_unix_ms=1, source="strata-default.db"))
    said = replacement(
        uid="0b6f", revision=1, found=ClusterUid(uid="0b6f.77aa"), at_revision=5, restoring=at_work
    )
    assert said == "the control plane is being restored: ada@ops began, from strata-default.db"


def test_a_uid_of_an_older_version_replaced_nobody() -> None:
    assert decode(ClusterUid, b'{"v":1,"uid":"0b6f"}') == ClusterUid(uid="0b6f")
    both = ClusterUid(uid="a", replaced=("b",))
    assert decode(ClusterUid, encode(both)) == both
