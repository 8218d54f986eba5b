"""Transactions: their writes, their reads, and the revisions they create."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.kv.txn import (
    Compare,
    Delete,
    Op,
    Put,
    Range,
    Target,
    Txn,
    absent,
    delete_prefix,
    read_prefix,
)
from tests.contract.conftest import Subject


async def test_a_key_records_its_create_revision_mod_revision_and_version(subject: Subject) -> None:
    first = await subject.put("a", value=b"1")
    await subject.put("b")
    third = await subject.put("a", value=b"2")
    assert third == first + 2
    kv = await subject.get("a")
    assert kv is not None
    assert (kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease) == (b"2", first, third, 2, 0)


async def test_a_recreated_key_restarts_its_version_and_create_revision(subject: Subject) -> None:
    await subject.put("a")
    await subject.put("a")
    await subject.store.execute(Txn(success=(Delete(key=subject.key("a")),)))
    assert await subject.get("a") is None
    again = await subject.put("a")
    kv = await subject.get("a")
    assert kv is not None
    assert (kv.create_revision, kv.mod_revision, kv.version) == (again, again, 1)


async def test_all_writes_of_a_transaction_share_its_revision(subject: Subject) -> None:
    revision = await subject.put("a", "b", "c")
    kvs = (await subject.store.read(read_prefix(subject.prefix))).kvs
    assert [kv.mod_revision for kv in kvs] == [revision] * 3


async def test_the_same_value_again_is_a_write(subject: Subject) -> None:
    first = await subject.put("a", value=b"1")
    assert await subject.put("a", value=b"1") == first + 1


@pytest.mark.parametrize("writes", ["nothing", "read", "delete of nothing", "other branch"])
async def test_a_transaction_without_writes_creates_no_revision(subject: Subject, writes: str) -> None:
    revision = await subject.put("a")
    txn = {
        "nothing": Txn(),
        "read": Txn(success=(Range(key=subject.key("a")),)),
        "delete of nothing": Txn(success=(Delete(key=subject.key("z")),)),
        "other branch": Txn(
            compares=(absent(subject.key("a")),), success=(Put(key=subject.key("b"), value=b""),)
        ),
    }[writes]
    result = await subject.store.execute(txn)
    assert result.revision == revision
    assert result.succeeded is (writes != "other branch")
    assert await subject.head() == revision


async def test_only_the_matching_branch_is_executed(subject: Subject) -> None:
    txn = Txn(
        compares=(absent(subject.key("a")),),
        success=(Put(key=subject.key("a"), value=b"then"),),
        failure=(Put(key=subject.key("b"), value=b"else"), Range(key=subject.key("a"))),
    )
    first = await subject.store.execute(txn)
    assert (first.succeeded, first.reads) == (True, ())
    second = await subject.store.execute(txn)
    assert second.succeeded is False
    assert [kv.value for kv in second.reads[0].kvs] == [b"then"]
    assert await subject.names() == ["a", "b"]


async def test_a_transaction_reads_its_own_writes_in_order(subject: Subject) -> None:
    everything = Range(key=subject.prefix, range_end=subject.end)
    result = await subject.store.execute(
        Txn(
            success=(
                everything,
                Put(key=subject.key("b"), value=b"1"),
                everything,
                Put(key=subject.key("a"), value=b"2"),
                everything,
            )
        )
    )
    names = [[kv.key.removeprefix(subject.prefix) for kv in read.kvs] for read in result.reads]
    assert names == [[], ["b"], ["a", "b"]]
    assert {kv.mod_revision for kv in result.reads[2].kvs} == {result.revision}
    assert {read.revision for read in result.reads} == {result.revision}


async def test_a_read_at_an_older_revision_does_not_see_its_own_transaction(subject: Subject) -> None:
    before = await subject.put("a", value=b"old")
    result = await subject.store.execute(
        Txn(success=(Put(key=subject.key("a"), value=b"new"), Range(key=subject.key("a"), revision=before)))
    )
    assert [kv.value for kv in result.reads[0].kvs] == [b"old"]


async def test_deletes_take_single_keys_and_ranges(subject: Subject) -> None:
    await subject.put("a", "b1", "b2", "c")
    await subject.store.execute(Txn(success=(delete_prefix(subject.key("b")), Delete(key=subject.key("c")))))
    assert await subject.names() == ["a"]


async def test_deletes_may_overlap(subject: Subject) -> None:
    await subject.put("a", "b", "c")
    await subject.store.execute(
        Txn(
            success=(
                Delete(key=subject.key("b")),
                Delete(key=subject.key("b")),
                Delete(key=subject.key("a"), range_end=subject.key("c")),
            )
        )
    )
    assert await subject.names() == ["c"]


async def test_ranges_are_half_open_and_in_order(subject: Subject) -> None:
    await subject.put("c", "a", "bb", "b", "b\0")
    result = await subject.store.read(Range(key=subject.key("a"), range_end=subject.key("bb")))
    assert [kv.key.removeprefix(subject.prefix) for kv in result.kvs] == ["a", "b", "b\0"]
    nothing = await subject.store.read(Range(key=subject.key("c"), range_end=subject.key("a")))
    assert nothing.kvs == ()


async def test_a_range_without_an_end_takes_all_from_a_key_on(subject: Subject) -> None:
    high = replace(subject, prefix="~" + subject.prefix)  # sorts after the keys of all other tests
    await high.put("a", "b", "c")
    result = await high.store.read(Range(key=high.key("b"), range_end="\0"))
    assert [kv.key for kv in result.kvs] == [high.key("b"), high.key("c")]
    await high.store.execute(Txn(success=(Delete(key=high.prefix, range_end="\0"),)))
    assert await high.names() == []


async def test_reads_honour_limit_and_keys_only(subject: Subject) -> None:
    await subject.put("a", "b", "c", value=b"v")
    everything = read_prefix(subject.prefix)
    part = await subject.store.read(replace(everything, limit=2))
    assert ([kv.key[-1] for kv in part.kvs], part.more) == (["a", "b"], True)
    whole = await subject.store.read(replace(everything, limit=3, keys_only=True))
    assert ([kv.key[-1] for kv in whole.kvs], whole.more) == (["a", "b", "c"], False)
    assert {kv.value for kv in whole.kvs} == {b""}
    assert {kv.version for kv in whole.kvs} == {1}


async def test_a_read_with_min_mod_revision_counts_older_keys_too(subject: Subject) -> None:
    await subject.put("a", "b", value=b"1")
    since = await subject.put("b", "c", value=b"2")
    await subject.put("d", value=b"3")
    newer = replace(read_prefix(subject.prefix), min_mod_revision=since)
    result = await subject.store.read(newer)
    assert ([kv.key[-1] for kv in result.kvs], result.count) == (["b", "c", "d"], 4)
    part = await subject.store.read(replace(newer, limit=1, keys_only=True))
    assert ([kv.key[-1] for kv in part.kvs], part.more, part.count) == (["b"], True, 4)
    none = await subject.store.read(replace(newer, min_mod_revision=result.revision + 1, limit=1))
    assert (none.kvs, none.count) == ((), 4)


async def test_the_past_can_be_read(subject: Subject) -> None:
    first = await subject.put("a", value=b"1")
    second = await subject.put("a", "b", value=b"2")
    await subject.store.execute(Txn(success=(delete_prefix(subject.prefix),)))
    assert await subject.names(revision=first - 1) == []
    assert await subject.names(revision=first) == ["a"]
    assert await subject.names(revision=second) == ["a", "b"]
    kv = await subject.get("a", revision=first)
    assert kv is not None
    assert kv.value == b"1"
    past = await subject.store.read(Range(key=subject.key("a"), revision=first))
    assert past.revision == second + 1, "a result tells the store's revision, also when it reads the past"


async def test_every_client_sees_a_write_at_once(subject: Subject) -> None:
    for number in range(20):
        value = str(number).encode()
        revision = await subject.put("a", value=value)
        read = await subject.other.read(Range(key=subject.key("a")))
        assert (read.kvs[0].value, read.revision) == (value, revision)


async def test_keys_may_be_any_text_and_values_any_bytes(subject: Subject) -> None:
    value = bytes(range(256)) * 100
    await subject.put("schlüssel/键", value=value)
    kv = await subject.get("schlüssel/键")
    assert kv is not None
    assert kv.value == value


@pytest.mark.parametrize("target", [Target.VERSION, Target.CREATE, Target.MOD])
@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("offset", [-1, 0, 1])
async def test_compares_of_versions_and_revisions_follow_their_operator(
    subject: Subject, target: Target, op: Op, offset: int
) -> None:
    created = await subject.put("a")
    await subject.put("a")
    changed = await subject.put("a")
    number = {Target.VERSION: 3, Target.CREATE: created, Target.MOD: changed}[target]
    compare = Compare(key=subject.key("a"), target=target, op=op, operand=number + offset)
    expected = {Op.EQUAL: offset == 0, Op.NOT_EQUAL: offset != 0, Op.GREATER: offset < 0, Op.LESS: offset > 0}
    assert (await subject.store.execute(Txn(compares=(compare,)))).succeeded is expected[op]


async def test_all_compares_must_hold(subject: Subject) -> None:
    await subject.put("a")
    a, b = absent(subject.key("a")), absent(subject.key("b"))
    assert not (await subject.store.execute(Txn(compares=(b, a)))).succeeded
    assert (await subject.store.execute(Txn(compares=(b, b)))).succeeded
