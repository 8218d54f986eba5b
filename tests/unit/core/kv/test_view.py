from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.kv.records import BarrierFloor, JobSpec, PoisonRecord, encode
from strata.core.kv.txn import Delete, Event, KeyValue, Put, Range, Txn
from strata.core.kv.view import View
from strata.testing.mvcc import State


def kv(key: str, value: bytes = b"x", *, mod: int = 1, create: int = 1) -> KeyValue:
    return KeyValue(key=key, value=value, create_revision=create, mod_revision=mod, version=1)


def wait_exit(key: str, mod: int) -> Event:
    return Event(kv=kv(key, b"", mod=mod, create=0), deleted=True)


def keys(view: View) -> list[str]:
    found = [found.key for found in view.walk("")]
    assert len(found) == view.size
    return found


# -- feeding ----------------------------------------------------------------------------------


@pytest.fixture
def view() -> View:
    return View()


def test_a_reset_replaces_the_view_and_returns_the_differences(view: View) -> None:
    assert [e.kv.key for e in view.reset(5, [kv("/a"), kv("/b")])] == ["/a", "/b"]
    events = view.reset(9, [kv("/b"), kv("/c", mod=8)])
    assert [(e.kv.key, e.deleted, e.kv.mod_revision) for e in events] == [
        ("/c", False, 8),
        ("/a", True, 9),
    ]
    assert view.revision == 9
    assert view.reset(9, [kv("/b", mod=1), kv("/c", mod=8)]) == ()
    assert [e.kv.mod_revision for e in view.reset(11, [kv("/b", mod=10), kv("/c", mod=8)])] == [10]


def test_changes_are_applied_in_order_and_never_backwards(view: View) -> None:
    view.apply(3, [Event(kv=kv("/a", mod=3))])
    view.apply(4, [wait_exit("/a", 4), Event(kv=kv("/b", mod=4))])
    assert (keys(view), view.revision) == (["/b"], 4)
    view.apply(4, [])
    with pytest.raises(ValueError, match="after 4"):
        view.apply(3, [])


def test_deleting_an_absent_key_changes_nothing(view: View) -> None:
    view.reset(1, [kv("/a/b")])
    view.apply(2, [wait_exit("/a", 2), wait_exit("/a/b/c", 2), wait_exit("/x", 2)])
    assert keys(view) == ["/a/b"]


# -- reading ----------------------------------------------------------------------------------


def test_an_absent_key_reads_as_none_and_0(view: View) -> None:
    assert view.get("/a") is None
    assert view.entry("/a", JobSpec) is None
    assert view.record("/a", JobSpec) is None
    assert view.mod_revision("/a") == 0
    assert list(view.entries("/a/", JobSpec)) == []
    assert view.names("/a/") == []


def test_entries_are_decoded_with_their_revisions(view: View) -> None:
    view.reset(9, [kv("/f/2", encode(BarrierFloor(round=2)), mod=8, create=4)])
    (entry,) = view.entries("/f/", BarrierFloor)
    assert (entry.name, entry.record.round) == ("2", 2)
    assert (entry.create_revision, entry.mod_revision) == (4, 8)
    assert view.mod_revision("/f/2") == 8


def test_entries_below_are_those_of_each_folder_in_order(view: View) -> None:
    assert list(view.entries_below("/f/", BarrierFloor)) == []
    value = encode(BarrierFloor(round=1))
    keys = ["/f/2/1", "/f/1/2", "/f/1/1", "/f/3", "/f/1/1/deeper", "/g/1/1"]
    view.reset(1, [kv(key, value) for key in keys])
    found = [entry.key for entry in view.entries_below("/f/", BarrierFloor)]
    assert found == ["/f/1/1", "/f/1/2", "/f/2/1"]
    assert [entry.name for entry in view.entries("/f/", BarrierFloor)] == ["3"], "folders are no entries"


def test_a_record_is_decoded_once_until_it_is_written_again(view: View) -> None:
    view.reset(1, [kv("/a", encode(JobSpec()))])
    first = view.record("/a", JobSpec)
    assert view.record("/a", JobSpec) is first
    view.apply(2, [Event(kv=kv("/a", encode(JobSpec(max_workers=2)), mod=2))])
    assert view.record("/a", JobSpec) == JobSpec(max_workers=2)


def test_a_poison_record_is_named_and_recovers_when_rewritten(view: View) -> None:
    view.reset(1, [kv("/a", b"by hand")])
    with pytest.raises(PoisonRecord, match="JobSpec"):
        view.record("/a", JobSpec)
    view.apply(2, [Event(kv=kv("/a", encode(JobSpec()), mod=2))])
    assert view.record("/a", JobSpec) == JobSpec()
    with pytest.raises(PoisonRecord, match="two kinds"):
        view.record("/a", BarrierFloor)


# -- against the store ------------------------------------------------------------------------

keys_st = st.lists(st.sampled_from(["a", "ab", "b"]), min_size=1, max_size=3).map(lambda p: "/" + "/".join(p))
operation = st.tuples(st.booleans(), keys_st)


@given(st.lists(st.lists(operation, min_size=1, max_size=4), max_size=20), st.integers(0, 20))
def test_a_view_fed_by_a_watch_is_the_keyspace(txns: list[list[tuple[bool, str]]], listed_after: int) -> None:
    state, view = State(), View()
    for index, operations in enumerate(txns):
        if index == listed_after:
            view.reset(state.head, everything(state))
        puts = {key: Put(key=key, value=b"v%d" % index) for is_put, key in operations if is_put}
        deletes = {key: Delete(key=key) for is_put, key in operations if not is_put and key not in puts}
        _result, written = state.apply(Txn(success=(*puts.values(), *deletes.values())))
        if index >= listed_after and written is not None:
            view.apply(written.number, written.events)
    if len(txns) <= listed_after:
        view.reset(state.head, everything(state))
    assert sorted(view.walk(""), key=lambda found: found.key) == everything(state)
    for folder in ("/", "/a/", "/a/b/"):
        expected = {
            found.key[len(folder) :].split("/")[0]
            for found in everything(state)
            if found.key.startswith(folder)
        }
        assert view.names(folder) == sorted(expected)
        assert view.count(folder) == len(expected)
        inside = {found.key for found in everything(state) if f"{found.key}/".startswith(folder)}
        assert {found.key for found in view.walk(folder)} == inside


def everything(state: State) -> list[KeyValue]:
    return list(state.read(Range(key="/", range_end="0")).kvs)


# -- derived values ---------------------------------------------------------------------------


def test_a_derived_value_is_computed_once_per_state_of_its_key() -> None:
    view, made = View(), []

    def make() -> int:
        made.append(view.mod_revision("/a"))
        return view.mod_revision("/a")

    view.reset(5, [kv("/a", mod=3), kv("/b")])
    assert [view.derived("/a", make) for _ in range(3)] == [3, 3, 3]
    view.apply(6, [Event(kv=kv("/b", mod=6))])
    assert view.derived("/a", make) == 3
    view.apply(7, [Event(kv=kv("/a", mod=7))])
    assert view.derived("/a", make) == 7
    view.apply(8, [wait_exit("/a", 8)])
    assert view.derived("/a", make) == 0
    view.reset(9, [kv("/a", mod=3)])
    assert view.derived("/a", make) == 3
    assert made == [3, 7, 0, 3]
