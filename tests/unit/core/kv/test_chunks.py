from __future__ import annotations

from collections.abc import Iterable

import pytest

from strata.core.ids import WorkerId
from strata.core.kv import chunks
from strata.core.kv.chunks import MAX_CHUNK_MEMBERS, chunks_of
from strata.core.kv.records import MAX_VALUE_BYTES, JobSpec, Member, MembersChunk, decode
from strata.core.kv.txn import Put, Txn
from tests.not_none import not_none
from tests.unit.core.rig import JOB, Store, carry_out, crowd, lead, plan, world_of


def members(count: int, *, name: str = "node-{:05d}") -> list[Member]:
    return [
        Member(
            worker=WorkerId(name.format(i)),
            incarnation=10**9 + i,
            group_rank=i,
            slots=8,
            first_rank=8 * i,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("name", ["w{}", "{:05d}" + "x" * 123, "node-{:05d}"])
@pytest.mark.parametrize("count", [0, 1, MAX_CHUNK_MEMBERS, MAX_CHUNK_MEMBERS + 1, 1500])
def test_chunks_hold_all_members_in_order_and_fit(name: str, count: int) -> None:
    given = members(count, name=name)
    found = chunks_of(given)
    assert all(len(chunk) <= MAX_VALUE_BYTES for chunk in found)
    parts = [decode(MembersChunk, chunk).members for chunk in found]
    assert all(0 < len(part) <= MAX_CHUNK_MEMBERS for part in parts)
    assert [member for part in parts for member in part] == given


def test_a_thousand_members_are_one_transaction(store: Store, epoch: int) -> None:
    crowd(store, 1000)
    (only,) = plan(store, epoch).txns
    write(store, [only])
    assert len(world_of(store)) == 1000
    assert store.problems() == []


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit chunks to three members, and transactions to about two chunks."""
    monkeypatch.setattr(chunks, "MAX_CHUNK_MEMBERS", 3)
    monkeypatch.setattr(chunks, "MAX_BYTES", 600)


def first_world(store: Store, epoch: int, *, settled: bool = False) -> int:
    """Let the leader finish; return the size of the world, which must be generation 1."""
    carry_out(store, epoch, settled=settled)
    assert store.problems() == []
    head = not_none(store.job().head())
    assert head.record.generation == 1, head.record.reason
    return len(world_of(store))


def write(store: Store, txns: Iterable[Txn]) -> None:
    for txn in txns:
        assert store.execute(txn).succeeded


def wait_exit(store: Store, *indices: int) -> None:
    for index in indices:
        store.delete(JOB.worker(f"node-{index:05d}"))


@pytest.mark.usefixtures("tiny")
def test_chunks_that_do_not_fit_are_written_before_the_head(store: Store, epoch: int) -> None:
    crowd(store, 20)
    first = plan(store, epoch).txns
    assert len(first) > 1
    write(store, first)
    assert store.job().world() is None
    (head,) = plan(store, epoch).txns
    write(store, [head])
    assert len(world_of(store)) == 20
    assert store.problems() == []


@pytest.mark.usefixtures("tiny")
def test_leftovers_of_a_larger_attempt_are_removed_not_adopted(store: Store, epoch: int) -> None:
    crowd(store, 20)
    write(store, plan(store, epoch).txns)
    wait_exit(store, *range(5, 20))
    store.put(JOB.spec, JobSpec(min_workers=1, max_workers=5))
    assert first_world(store, epoch) == 5


@pytest.mark.usefixtures("tiny")
def test_a_chunk_that_comes_late_makes_the_head_fail(store: Store, epoch: int) -> None:
    """t1: the leader sends a chunk and gets no answer. t2: the leader plans again. t3: the first chunk arrives."""
    crowd(store, 20)
    lost = plan(store, epoch).txns
    wait_exit(store, *range(10, 20))
    write(store, plan(store, epoch, settled=True).txns)
    (head,) = plan(store, epoch, settled=True).txns
    write(store, lost)  # succeeds: the fence and the head are unchanged
    assert not store.execute(head).succeeded
    assert first_world(store, epoch, settled=True) == 10
    for txn in lost:
        assert not store.execute(txn).succeeded, "after the head nothing is overwritten"
    assert store.problems() == []


@pytest.mark.usefixtures("tiny")
def test_a_late_chunk_beside_the_known_ones_makes_the_head_fail(store: Store, epoch: int) -> None:
    crowd(store, 3)
    (chunk_and_head,) = plan(store, epoch).txns
    stray = Put(key=JOB.members_chunk(1, epoch, 7), value=chunks_of(members(2))[0])
    store.put(stray.key, decode(MembersChunk, stray.value))
    assert not store.execute(chunk_and_head).succeeded
    assert first_world(store, epoch) == 3


@pytest.mark.usefixtures("tiny")
def test_another_leaders_chunks_are_never_adopted(store: Store) -> None:
    deposed = lead(store, "r1")
    crowd(store, 20)
    abandoned = plan(store, deposed).txns
    assert store.execute(abandoned[0]).succeeded
    epoch = lead(store, "r2")
    assert not store.execute(abandoned[1]).succeeded
    wait_exit(store, *range(4, 20))
    store.put(JOB.spec, JobSpec(min_workers=1, max_workers=4))
    assert first_world(store, epoch) == 4
