from __future__ import annotations

import pytest

from strata.core.txn import (
    Compare,
    Delete,
    Op,
    Put,
    Range,
    Target,
    Txn,
    absent,
    created_at,
    delete_prefix,
    none_in,
    none_newer_in,
    prefix_end,
    present,
    read_prefix,
    unchanged,
)
from tests.unit.core.rig import Store


class Keyspace(Store):
    def write(self, key: str) -> int:
        return self.execute(Txn(success=(Put(key=key, value=b"x"),))).revision

    def holds(self, compare: Compare) -> bool:
        return self.execute(Txn(compares=(compare,))).succeeded


@pytest.fixture
def keyspace() -> Keyspace:
    return Keyspace()


def test_absent_and_present(keyspace: Keyspace) -> None:
    assert keyspace.holds(absent("a"))
    assert not keyspace.holds(present("a"))
    keyspace.write("a")
    assert not keyspace.holds(absent("a"))
    assert keyspace.holds(present("a"))


def test_unchanged_since_a_revision_or_since_there_was_nothing(keyspace: Keyspace) -> None:
    assert keyspace.holds(unchanged("a", 0))
    first = keyspace.write("a")
    assert keyspace.holds(unchanged("a", first))
    assert not keyspace.holds(unchanged("a", 0))
    keyspace.write("a")
    assert not keyspace.holds(unchanged("a", first))


def test_an_incarnation_outlives_writes_but_not_its_deletion(keyspace: Keyspace) -> None:
    born = keyspace.write("a")
    keyspace.write("a")
    assert keyspace.holds(created_at("a", born))
    keyspace.delete("a")
    assert not keyspace.holds(created_at("a", born))
    keyspace.write("a")
    assert not keyspace.holds(created_at("a", born))


@pytest.mark.parametrize("revision", [0, -1])
def test_a_fence_on_nothing_is_refused(revision: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        created_at("a", revision)


def test_none_in_a_folder(keyspace: Keyspace) -> None:
    keyspace.write("a")
    keyspace.write("a0")
    assert keyspace.holds(none_in("a/"))
    keyspace.write("a/x")
    assert not keyspace.holds(none_in("a/"))


def test_none_newer_in_a_folder_sees_additions_and_changes_but_no_deletes(keyspace: Keyspace) -> None:
    assert keyspace.holds(none_newer_in("a/", 1))
    keyspace.write("a/x")
    seen = keyspace.write("a/y")
    assert keyspace.holds(none_newer_in("a/", seen))
    assert not keyspace.holds(none_newer_in("a/", seen - 1))
    keyspace.delete("a/x")
    assert keyspace.holds(none_newer_in("a/", seen))
    keyspace.write("a/y")
    assert not keyspace.holds(none_newer_in("a/", seen))


def test_the_end_of_a_prefix() -> None:
    assert prefix_end("a/") == "a0"
    assert prefix_end("ab") == "ac"
    with pytest.raises(ValueError, match="no end"):
        prefix_end("")
    assert read_prefix("a/", revision=3) == Range(key="a/", range_end="a0", revision=3)
    assert delete_prefix("a/") == Delete(key="a/", range_end="a0")


def test_a_txn_grows_without_changing_the_one_it_came_from() -> None:
    one = Txn(compares=(absent("a"),), success=(Delete(key="b"),), failure=(Range(key="c"),))
    other = one.and_if(present("d"), absent("e")).then(Put(key="f", value=b""))
    assert one.compares == (absent("a"),)
    assert other.compares == (absent("a"), present("d"), absent("e"))
    assert other.success == (Delete(key="b"), Put(key="f", value=b""))
    assert other.failure == one.failure


def test_a_condition_names_what_it_looks_at() -> None:
    assert absent("k") == Compare(key="k", target=Target.VERSION, op=Op.EQUAL, operand=0)
