"""The faults of the in-memory store. tests/contract checks that it behaves as etcd otherwise."""

import asyncio

import pytest

from strata.core.kv.store import Compacted
from strata.core.kv.txn import Put, Range, Txn, WatchBatch
from strata.errors import NotFound, Unavailable
from strata.testing.memory_client import MemoryClient
from strata.testing.memory_store import MemoryStore
from strata.testing.network import PROMPT, Call, Fate, PromptNetwork
from strata.testing.virtual_time import in_virtual_time


class Scripted(PromptNetwork):
    """Gives each `execute` the next fate of a list; after the list, every call is prompt."""

    def __init__(self, *fates: Fate) -> None:
        self.fates = list(fates)
        self.calls: list[Call] = []

    def fate(self, call: Call) -> Fate:
        if call.kind == "execute" and self.fates:
            return self.fates.pop(0)
        return PROMPT

    def applied(self, call: Call) -> None:
        self.calls.append(call)


def now() -> float:
    return asyncio.get_running_loop().time()


def put(value: bytes = b"", key: str = "k") -> Txn:
    return Txn(success=(Put(key=key, value=value),))


def value(store: MemoryStore, key: str = "k") -> bytes | None:
    kvs = store.read(Range(key=key)).kvs
    return kvs[0].value if kvs else None


def client_with(*fates: Fate) -> tuple[MemoryStore, MemoryClient]:
    store = MemoryStore()
    return store, store.client(network=Scripted(*fates))


@in_virtual_time()
async def test_a_lost_request_leaves_no_trace() -> None:
    store, client = client_with(Fate(lost="request"))
    with pytest.raises(Unavailable):
        await client.execute(put())
    assert value(store) is None


@in_virtual_time()
async def test_a_lost_answer_raises_though_the_write_took_effect() -> None:
    store, client = client_with(Fate(lost="answer"))
    with pytest.raises(Unavailable):
        await client.execute(put(b"1"))
    assert value(store) == b"1"


@in_virtual_time()
async def test_a_late_request_takes_effect_after_its_caller_gave_up() -> None:
    store, client = client_with(Fate(delay_s=5))
    begin = now()
    with pytest.raises(Unavailable):
        await client.execute(put(b"late"))
    assert now() - begin == pytest.approx(1, abs=1e-3)
    store.execute(put(b"early"))
    await asyncio.sleep(5)
    assert value(store) == b"late"


@in_virtual_time()
async def test_cancelling_a_request_does_not_undo_it() -> None:
    store, client = client_with(Fate(delay_s=0.5))
    task = asyncio.create_task(client.execute(put(b"1")))
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.wait([task])
    assert value(store) is None
    await asyncio.sleep(1)
    assert value(store) == b"1"


@in_virtual_time()
async def test_delays_reorder_calls() -> None:
    store, client = client_with(Fate(delay_s=0.3), Fate(delay_s=0.1))
    one, two = await asyncio.gather(client.execute(put(b"1")), client.execute(put(b"2")))
    assert one.revision > two.revision
    assert value(store) == b"1"


@in_virtual_time()
async def test_the_network_sees_an_effect_before_the_caller_does() -> None:
    store = MemoryStore()
    network = Scripted()
    client = store.client("c", network=network)
    answered = asyncio.create_task(client.execute(put()))
    while not network.calls:
        assert not answered.done()
        await asyncio.sleep(0)
    assert network.calls == [Call(client="c", kind="execute", argument=put())]
    assert not answered.done()
    await answered


@in_virtual_time()
async def test_a_partition_swallows_requests_and_answers() -> None:
    store, client = client_with(Fate(delay_s=0.2), Fate(answer_delay_s=0.2), PROMPT)
    on_its_way = asyncio.create_task(client.execute(put(b"lost", "a")))
    applied = asyncio.create_task(client.execute(put(b"heard by nobody", "b")))
    await asyncio.sleep(0.1)
    client.partition()
    begin = now()
    with pytest.raises(Unavailable):
        await client.execute(put(b"not sent", "c"))
    assert now() - begin == pytest.approx(1, abs=1e-3), "a partition is silent"
    client.heal()
    await asyncio.sleep(1)
    with pytest.raises(Unavailable):
        await on_its_way
    with pytest.raises(Unavailable):
        await applied
    assert [value(store, key) for key in "abc"] == [None, b"heard by nobody", None]
    await client.execute(put(b"fine", "c"))


@in_virtual_time()
async def test_a_partition_is_one_clients_alone() -> None:
    store = MemoryStore()
    one, two = store.client("one"), store.client("two")
    one.partition()
    await two.execute(put())
    with pytest.raises(Unavailable):
        await one.read(Range(key="k"))


@in_virtual_time()
async def test_a_watch_is_silent_in_a_partition_and_catches_up_after_it() -> None:
    store = MemoryStore()
    client = store.client()
    async with client.watch("k", None, start_revision=1) as batches:
        store.execute(put(b"1"))
        assert len((await anext(batches)).events) == 1
        client.partition()
        for text in (b"2", b"3", b"4"):
            store.execute(put(text))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await anext(batches)
        client.heal()
        batch = await anext(batches)
        assert [event.kv.value for event in batch.events] == [b"2", b"3", b"4"]
        store.execute(put(b"5"))
        assert [event.kv.value for event in (await anext(batches)).events] == [b"5"]


@in_virtual_time()
async def test_a_watch_that_was_cut_off_too_long_ends() -> None:
    store = MemoryStore()
    client = store.client()
    async with client.watch("k", None, start_revision=2) as batches:
        client.partition()
        for _ in range(5):
            store.execute(put())
        store.compact(4)
        client.heal()
        with pytest.raises(Compacted, match="4 is the oldest"):
            await anext(batches)


@in_virtual_time()
async def test_slow_batches_keep_their_order() -> None:
    delays = [3.0, 1.0, 0.0]

    class Slow(PromptNetwork):
        def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
            assert client == "slow"
            return delays.pop(0) if batch.events else 0.0

    store = MemoryStore()
    async with store.client("slow", network=Slow()).watch("k", None, start_revision=2) as batches:
        begin = now()
        for text in (b"1", b"2", b"3"):
            store.execute(put(text))
        seen = [(await anext(batches)).events[0].kv.value for _ in range(3)]
    assert seen == [b"1", b"2", b"3"]
    assert now() - begin == pytest.approx(3, abs=1e-3)


@in_virtual_time()
async def test_an_idle_watch_reports_progress() -> None:
    store = MemoryStore()
    async with store.client(progress_s=5).watch("k", None, start_revision=2) as batches:
        begin = now()
        store.execute(put(key="other"))
        assert await anext(batches) == WatchBatch(revision=2)
        assert await anext(batches) == WatchBatch(revision=2)
        assert now() - begin == pytest.approx(10, abs=1e-3)


@in_virtual_time()
async def test_closing_ends_calls_and_watches_but_not_sent_requests() -> None:
    store, client = client_with(Fate(delay_s=0.5))
    async with client.watch("k", None, start_revision=2) as batches:
        waiting = asyncio.create_task(anext(batches))
        sent = asyncio.create_task(client.execute(put(b"1")))
        await asyncio.sleep(0.1)
        await client.close()
        for task in (waiting, sent):
            with pytest.raises(Unavailable):
                await task
    with pytest.raises(Unavailable):
        await client.read(Range(key="k"))
    await asyncio.sleep(1)
    assert value(store) == b"1"


@in_virtual_time()
async def test_leases_live_in_virtual_time() -> None:
    store = MemoryStore()
    client = store.client()
    lease = await client.grant(3_600)
    store.execute(Txn(success=(Put(key="k", value=b"", lease=lease.id),)))
    await asyncio.sleep(3_599)
    assert await client.keep_alive(lease.id) == 3_600
    await asyncio.sleep(3_599)
    assert value(store) == b""
    await asyncio.sleep(2)
    assert value(store) is None
    with pytest.raises(NotFound):
        await client.keep_alive(lease.id)


@pytest.mark.parametrize(("requested", "granted"), [(1, 2), (2, 2), (6, 6)])
def test_a_short_lease_is_lengthened_as_etcd_does(requested: int, granted: int) -> None:
    @in_virtual_time()
    async def check() -> None:
        assert MemoryStore().grant(requested).ttl_s == granted

    check()


@in_virtual_time()
async def test_a_watch_may_be_cancelled_at_any_time() -> None:
    store = MemoryStore()
    client = store.client()
    async with client.watch("k", None, start_revision=1) as batches:
        store.execute(put())
        assert client.break_watches() == 1
        assert (await anext(batches)).revision == store.state.head, "what was on its way arrives"
        with pytest.raises(Unavailable):
            await anext(batches)


@in_virtual_time()
async def test_leases_restart_when_etcd_has_a_leader_again() -> None:
    store = MemoryStore()
    lease = store.grant(3)
    store.execute(Txn(success=(Put(key="k", value=b"", lease=lease.id),)))
    store.hold_leases()
    await asyncio.sleep(10)
    assert value(store) is not None
    store.release_leases()
    await asyncio.sleep(2.9)
    assert value(store) is not None
    await asyncio.sleep(1.2)
    assert value(store) is None


@in_virtual_time()
async def test_a_lease_may_lose_its_keys_and_be_renewed_all_the_same() -> None:
    store = MemoryStore()
    lease = store.grant(3)
    store.execute(Txn(success=(Put(key="k", value=b"", lease=lease.id),)))
    assert store.drop_keys_of(lease.id) == 1
    assert value(store) is None
    assert store.keep_alive(lease.id) == 3
