"""Compaction: which revisions can be read afterwards, and which cannot."""

from __future__ import annotations

import pytest

from strata.core.kv.store import Compacted
from strata.core.kv.txn import Delete, Put, Range, Txn
from strata.errors import InvalidArgument
from tests.contract.conftest import Subject


async def test_revisions_before_the_compaction_are_unreadable_and_later_ones_stay(subject: Subject) -> None:
    first = await subject.put("a", "b", value=b"1")
    second = await subject.put("a", value=b"2")
    third = await subject.put("a", value=b"3")
    await subject.store.compact(second)
    with pytest.raises(Compacted):
        await subject.get("a", revision=first)
    for revision, value in ((second, b"2"), (third, b"3"), (0, b"3")):
        kv = await subject.get("a", revision=revision)
        assert kv is not None
        assert (kv.value, kv.create_revision) == (value, first)
        assert await subject.names(revision=revision) == ["a", "b"]


async def test_deleted_keys_stay_deleted(subject: Subject) -> None:
    await subject.put("a", "b")
    deleted = (await subject.store.execute(Txn(success=(Delete(key=subject.key("a")),)))).revision
    await subject.store.compact(deleted)
    assert await subject.names() == ["b"]
    assert await subject.names(revision=deleted) == ["b"]
    kv = await subject.get("a", revision=deleted)
    assert kv is None


async def test_the_newest_revision_may_be_compacted(subject: Subject) -> None:
    head = await subject.put("a", value=b"1")
    await subject.store.compact(head)
    kv = await subject.get("a", revision=head)
    assert kv is not None
    assert (await subject.put("a")) == head + 1


async def test_compacting_the_same_or_an_older_revision_again_is_no_error(subject: Subject) -> None:
    head = await subject.put("a")
    await subject.store.compact(head)
    await subject.store.compact(head)
    await subject.store.compact(head - 1)


async def test_a_future_revision_cannot_be_compacted(subject: Subject) -> None:
    head = await subject.put("a")
    with pytest.raises(InvalidArgument):
        await subject.store.compact(head + 1)


async def test_a_transaction_that_reads_a_compacted_revision_writes_nothing(subject: Subject) -> None:
    first = await subject.put("a")
    head = await subject.put("a")
    await subject.store.compact(head)
    txn = Txn(success=(Put(key=subject.key("b"), value=b""), Range(key=subject.key("a"), revision=first)))
    with pytest.raises((InvalidArgument, Compacted)):
        await subject.store.execute(txn)
    assert await subject.head() == head
