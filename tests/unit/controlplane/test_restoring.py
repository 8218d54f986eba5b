"""The states of etcd in which a restore may begin."""

from __future__ import annotations

import pytest

from strata.controlplane.restoring import base_in_place
from strata.controlplane.rewriting import Keyspace
from strata.core.kv.records import ClusterUid
from strata.core.restore.records import Restoring
from strata.errors import NotFound, Refused


def held(uid: str = "", restoring: Restoring | None = None) -> Keyspace:
    return Keyspace(
        revision=7,
        jobs={"/a": b"job"},
        uid=ClusterUid(uid=uid) if uid else None,
        uid_revision=1 if uid else 0,
        restoring=restoring,
        restoring_revision=5 if restoring is not None else 0,
        replicas=(),
        backup=None,
    )


def interrupted(*, in_place: bool, source: str = "the backup of yesterday") -> Restoring:
    return Restoring(who="ada", since_unix_ms=1, source=source, uid="aaaa", in_place=in_place)


def test_an_in_place_restore_starts_from_the_keys_in_etcd() -> None:
    for keyspace in (held("aaaa"), held(restoring=interrupted(in_place=True))):
        base = base_in_place(keyspace)
        assert (base.uid, base.jobs, base.in_place) == ("aaaa", {"/a": b"job"}, True)
    with pytest.raises(NotFound, match="holds no cluster"):
        base_in_place(held())


@pytest.mark.parametrize("source", ["the backup of yesterday", "storage", ""])
def test_a_partial_restore_from_another_source_is_not_completed_in_place(source: str) -> None:
    """After an interrupted restore from a backup, the keys that it has not written would count as removed."""
    with pytest.raises(Refused, match="etcd holds only a part of") as error:
        base_in_place(held(restoring=interrupted(in_place=False, source=source)))
    assert error.value.hint == f"run that restore again, from {source or 'its source'}: it continues"
