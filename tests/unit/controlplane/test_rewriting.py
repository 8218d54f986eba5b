"""Rewriting the keys under a fence, with interruptions and with writes in between."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest

from strata.controlplane.rewriting import (
    PAUSE_S,
    TRIES,
    Keyspace,
    Rewriting,
    batches,
    differences,
    read_keyspace,
)
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import ClusterUid, Leader, decode, encode
from strata.core.kv.txn import Delete, Operation, Put, Range, Txn, TxnResult, absent
from strata.core.restore.records import Restoring
from strata.errors import Conflict, Refused, Unavailable
from strata.testing.memory_store import MemoryStore
from tests.not_none import not_none

KEYS = ClusterKeys("test")
WANTED = {KEYS.job("new").spec: b"s", KEYS.job("new").head: b"h", KEYS.job("new").phase: b"p"}
HELD = {KEYS.job("old").spec: b"o", KEYS.job("new").spec: b"x"}
BEFORE = ClusterUid(uid="aaaa")
ME = Restoring(who="ada", since_unix_ms=1, source="a backup")


class Interruption(BaseException):
    """Stands for the end of the process."""


class Rig:
    """An etcd that holds an old cluster, and the restores that replace it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        for key, value in {**HELD, KEYS.uid: encode(BEFORE)}.items():
            self.store.execute(Txn(success=(Put(key=key, value=value),)))
        self.count = 0
        self.between: Callable[[int, Txn], None] = lambda _count, _txn: None
        self.slept: list[float] = []

    def rewriting(self, me: Restoring = ME) -> Rewriting:
        client = self.store.client()
        execute = client.execute

        async def watched(txn: Txn) -> TxnResult:
            self.count += 1
            self.between(self.count, txn)
            return await execute(txn)

        client.execute = watched  # type: ignore[method-assign]  # so that a test can act before each transaction
        return Rewriting(client, KEYS, me, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def put(self, key: str, value: bytes = b"late") -> None:
        self.store.execute(Txn(success=(Put(key=key, value=value),)))

    async def look(self) -> Keyspace:
        return await read_keyspace(self.store.client(), KEYS)

    async def keys(self) -> dict[str, bytes]:
        return dict((await self.look()).jobs)

    async def uid(self) -> ClusterUid | None:
        return (await read_keyspace(self.store.client(), KEYS)).uid

    async def restoring(self) -> Restoring | None:
        return (await read_keyspace(self.store.client(), KEYS)).restoring


async def restore(rig: Rig, me: Restoring = ME, *, chance: str = "77") -> ClusterUid:
    rewriting = rig.rewriting(me)
    await rewriting.begin(await rig.look())
    await rewriting.bring(WANTED)
    return await rewriting.finish("bbbb", 5, chance)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    asyncio.run(main())


def test_a_restore_writes_the_wanted_keys_and_a_successor_uid() -> None:
    async def work() -> None:
        rig = Rig()
        leader = Leader(instance="i", replica="r", address="")  # type: ignore[arg-type]  # any ids
        rig.put(KEYS.leader, encode(leader))
        found = await restore(rig)
        assert await rig.keys() == WANTED
        assert found == ClusterUid(uid="bbbb.5.77", replaced=("aaaa",)) == await rig.uid()
        assert await rig.restoring() is None
        assert not rig.store.state.read(Range(key=KEYS.leader)).kvs

    run(work)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_restore_interrupted_at_any_transaction_is_finished_by_the_next_one(at: int) -> None:
    async def work() -> None:
        rig = Rig()

        def interrupt(count: int, _txn: Txn) -> None:
            if count == at:
                raise Interruption

        rig.between = interrupt
        with pytest.raises(Interruption):
            await restore(rig)
        rig.between = lambda _count, _txn: None
        held = await read_keyspace(rig.store.client(), KEYS)
        assert (held.uid is None) is (held.restoring is not None), "never both, never neither"
        again = rig.rewriting(Restoring(who="bob", since_unix_ms=2, source="a backup"))
        before = await again.begin(await rig.look())
        assert (before.who if before is not None else None) == (None if at == 1 else "ada")
        await again.bring(WANTED)
        assert (await again.finish("bbbb", 5, "88")).replaced == ("aaaa",)
        assert await rig.keys() == WANTED

    run(work)


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_indeterminate_answer_is_followed_by_a_retry_or_a_read(at: int, lost: str) -> None:
    async def work() -> None:
        rig = Rig()
        rewriting = rig.rewriting()
        store = rewriting._store
        execute = store.execute

        async def unclear(txn: Txn) -> TxnResult:
            if rig.count + 1 == at and lost == "request":
                rig.count += 1
                raise Unavailable("lost", hint="")
            result = await execute(txn)
            if rig.count == at and lost == "answer":
                raise Unavailable("lost", hint="")
            return result

        store.execute = unclear  # type: ignore[method-assign]  # as above
        await rewriting.begin(await rig.look())
        await rewriting.bring(WANTED)
        assert (await rewriting.finish("bbbb", 5, "77")).uid == "bbbb.5.77"
        assert await rig.keys() == WANTED
        assert await rig.restoring() is None

    run(work)


@pytest.mark.parametrize(
    ("error", "tries"),
    [(Unavailable("silent", hint=""), TRIES), (Refused("no"), 1), (asyncio.CancelledError(), 1)],
)
def test_a_batch_is_tried_again_only_while_etcd_does_not_answer(error: BaseException, tries: int) -> None:
    async def work() -> None:
        rig = Rig()

        def fail(count: int, _txn: Txn) -> None:
            if count > 1:
                raise error

        rig.between = fail
        rewriting = rig.rewriting()
        await rewriting.begin(await rig.look())
        with pytest.raises(type(error)) as raised:
            await rewriting.bring(WANTED)
        assert raised.value is error
        assert rig.count == 1 + tries
        assert rig.slept == [PAUSE_S] * (tries - 1)

    run(work)


def test_a_replica_unaware_of_the_restore_changes_nothing() -> None:
    async def work() -> None:
        rig = Rig()

        def writes(count: int, _txn: Txn) -> None:
            if count in {2, 3}:
                rig.put(KEYS.job("old").worker(f"w{count}"))

        rig.between = writes
        await restore(rig)
        assert await rig.keys() == WANTED

    run(work)


def test_a_restore_fails_while_another_writer_keeps_writing() -> None:
    async def work() -> None:
        rig = Rig()
        rig.between = lambda count, _txn: rig.put(KEYS.job("old").worker(f"w{count}")) if count > 1 else None
        with pytest.raises(Refused, match="another process writes") as error:
            await restore(rig)
        assert "stop the coordinators" in error.value.hint

    run(work)


def test_of_two_restores_the_later_takes_over_and_the_earlier_stops() -> None:
    async def work() -> None:
        rig = Rig()
        first = rig.rewriting()
        await first.begin(await rig.look())
        second = rig.rewriting(Restoring(who="bob", since_unix_ms=2))
        before = await second.begin(await rig.look())
        assert not_none(before).who == "ada"
        with pytest.raises(Conflict, match="another restore took over: bob began"):
            await first.bring(WANTED)
        await second.bring(WANTED)
        await second.finish("bbbb", 5, "77")
        with pytest.raises(Conflict, match="another restore has finished meanwhile"):
            await first.bring(WANTED)

    run(work)


def test_a_plan_made_before_another_restore_is_not_written() -> None:
    """Two operators plan a restore.

    The first operator's restore finishes, and a job commits. Then the second operator confirms.
    """

    async def work() -> None:
        rig = Rig()
        seen = await rig.look()
        await restore(rig)
        rig.put(KEYS.job("new").latest, b"committed since")
        before = (await rig.keys(), await rig.uid())
        for in_place in (False, True):
            late = Restoring(who="bob", since_unix_ms=2, in_place=in_place)
            with pytest.raises(Conflict, match="changed cluster test since it was read") as error:
                await rig.rewriting(late).begin(seen)
            assert error.value.hint == "run it again"
        assert (await rig.keys(), await rig.uid()) == before
        assert await rig.restoring() is None

    run(work)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_job_s_later_write_ends_a_restore_unless_it_is_in_place(in_place: bool) -> None:
    async def work() -> None:
        rig = Rig()
        seen = await rig.look()
        rig.put(KEYS.job("old").latest, b"committed since")
        rewriting = rig.rewriting(dataclasses.replace(ME, in_place=in_place))
        if in_place:
            await rewriting.begin(seen)
            assert not_none(await rig.restoring()).in_place
            return
        with pytest.raises(Conflict):
            await rewriting.begin(seen)
        assert await rig.uid() == BEFORE

    run(work)


def test_a_concurrent_restore_does_not_take_over_one_it_has_not_seen() -> None:
    async def work() -> None:
        rig = Rig()
        seen = await rig.look()
        first = rig.rewriting()
        await first.begin(seen)
        with pytest.raises(Conflict):
            await rig.rewriting(Restoring(who="bob", since_unix_ms=2)).begin(seen)
        await first.bring(WANTED)
        assert (await first.finish("bbbb", 5, "77")).uid == "bbbb.5.77"

    run(work)


def test_a_cluster_of_the_same_lineage_is_not_named_as_replaced() -> None:
    async def work() -> None:
        rig = Rig()
        rig.put(KEYS.uid, encode(ClusterUid(uid="bbbb.11", replaced=("cccc",))))
        assert (await restore(rig)).replaced == ("cccc",)

    run(work)


def test_a_backup_is_recorded_unless_a_newer_one_is() -> None:
    async def work() -> None:
        rig = Rig()
        rewriting = rig.rewriting()
        await rewriting.begin(await rig.look())
        await rewriting.bring(WANTED, backup=b"old")
        await rewriting.finish("bbbb", 5, "77")
        assert (await read_keyspace(rig.store.client(), KEYS)).backup == b"old"
        again = rig.rewriting()
        await again.begin(await rig.look())
        await again.bring(WANTED, backup=b"older")
        await again.finish("bbbb", 5, "88")
        assert (await read_keyspace(rig.store.client(), KEYS)).backup == b"old"

    run(work)


def test_no_replica_can_begin_a_cluster_in_between() -> None:
    """A replica creates `P/uid` if `P/uid` and `P/restoring` are both absent. No revision has both absent."""

    async def work() -> None:
        rig = Rig()
        seen = []

        def look(_count: int, _txn: Txn) -> None:
            seen.append(rig.store.execute(Txn(compares=(absent(KEYS.uid), absent(KEYS.restoring)))).succeeded)

        rig.between = look
        first = rig.rewriting()
        await first.begin(await rig.look())
        await restore(rig, Restoring(who="bob", since_unix_ms=2))
        assert not any(seen)

    run(work)


def test_deletes_come_first_and_heads_last() -> None:
    operations = list(differences(HELD, WANTED, KEYS))
    job = KEYS.job("new")
    assert [(type(o), o.key) for o in operations] == [
        (Delete, KEYS.job("old").spec),
        (Put, job.phase),
        (Put, job.spec),
        (Put, job.head),
    ]
    assert list(differences(WANTED, WANTED, KEYS)) == []


def test_no_transaction_is_larger_than_etcd_takes() -> None:
    many: list[Operation] = [Put(key=f"/{number}", value=b"v" * 20_000) for number in range(260)]
    sizes = [sum(len(o.value) for o in batch if isinstance(o, Put)) for batch in batches(many)]
    assert max(sizes) < 1 << 20
    assert sum(len(batch) for batch in batches(many)) == 260
    small: list[Operation] = [Delete(key=f"/{number}") for number in range(250)]
    assert [len(batch) for batch in batches(small)] == [100, 100, 50]


def test_an_unreadable_restore_record_counts_as_a_restore_in_progress() -> None:
    async def work() -> None:
        rig = Rig()
        rig.put(KEYS.restoring, b"nonsense")
        held = await read_keyspace(rig.store.client(), KEYS)
        assert not_none(held.restoring).who == "somebody"
        await restore(rig)
        assert decode(ClusterUid, encode(not_none(await rig.uid()))).uid == "bbbb.5.77"

    run(work)
