from __future__ import annotations

import pytest

from strata.core.kv.codec import PoisonRecord
from strata.core.kv.txn import (
    Compare,
    Decision,
    Delete,
    Put,
    Range,
    Txn,
    absent,
    created_at,
    delete_prefix,
    none_in,
    none_newer_in,
    prefix_end,
    present,
    read_prefix,
    refusable,
    unchanged,
)
from strata.errors import NotFound, StrataError
from tests.unit.core.rig import Store


@pytest.mark.parametrize(
    ("done", "compare", "holds"),
    [
        ("", absent("a"), True),
        ("", present("a"), False),
        ("+a", absent("a"), False),
        ("+a", present("a"), True),
        ("", unchanged("a", 0), True),
        ("+a", unchanged("a", 0), False),
        ("+a", unchanged("a", 2), True),
        ("+a +a", unchanged("a", 2), False),
        ("+a +a", created_at("a", 2), True),
        ("+a -a", created_at("a", 2), False),
        ("+a -a +a", created_at("a", 2), False),
        ("+a +a0", none_in("a/"), True),
        ("+a +a0 +a/x", none_in("a/"), False),
        ("", none_newer_in("a/", 1), True),
        ("+a/x +a/y", none_newer_in("a/", 3), True),
        ("+a/x +a/y", none_newer_in("a/", 2), False),
        ("+a/x +a/y -a/x", none_newer_in("a/", 3), True),  # a deletion does not count
        ("+a/x +a/y -a/x +a/y", none_newer_in("a/", 3), False),
    ],
)
def test_a_compare_is_evaluated_against_earlier_writes(done: str, compare: Compare, holds: bool) -> None:
    """Each write gets its own revision, the first one 2; `+` is a put, `-` a deletion."""
    store = Store()
    for change in done.split():
        key = change[1:]
        store.execute(Txn(success=(Put(key=key, value=b"x") if change[0] == "+" else Delete(key=key),)))
    assert store.execute(Txn(compares=(compare,))).succeeded is holds


@pytest.mark.parametrize("revision", [0, -1])
def test_a_fence_on_revision_zero_or_less_is_refused(revision: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        created_at("a", revision)


def test_the_end_of_a_prefix() -> None:
    assert prefix_end("a/") == "a0"
    assert prefix_end("ab") == "ac"
    with pytest.raises(ValueError, match="no end"):
        prefix_end("")
    assert read_prefix("a/", revision=3) == Range(key="a/", range_end="a0", revision=3)
    assert delete_prefix("a/") == Delete(key="a/", range_end="a0")


def test_extending_a_transaction_leaves_the_original_unchanged() -> None:
    one = Txn(compares=(absent("a"),), success=(Delete(key="b"),), failure=(Range(key="c"),))
    other = one.and_if(present("d"), absent("e")).then(Put(key="f", value=b""))
    assert one.compares == (absent("a"),)
    assert other.compares == (absent("a"), present("d"), absent("e"))
    assert other.success == (Delete(key="b"), Put(key="f", value=b""))
    assert other.failure == one.failure


def test_an_error_in_a_decision_becomes_its_refusal_except_a_poison_record() -> None:
    @refusable
    def decide(error: StrataError) -> Decision:
        raise error

    missing = NotFound("no such job")
    assert decide(missing) == Decision(reason="no such job", refusal=missing)
    with pytest.raises(PoisonRecord):
        decide(PoisonRecord("by hand"))
