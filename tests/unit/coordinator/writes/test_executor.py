"""A decision must take effect once, whatever the network does, and its caller must get an answer from a fresh view."""

from __future__ import annotations

import asyncio

import pytest

from strata.coordinator.writes.coalesce import MAX_BATCH
from strata.core.kv.txn import (
    Compare,
    Decision,
    Put,
    Range,
    Txn,
    absent,
    delete_prefix,
    none_in,
    unchanged,
)
from strata.core.kv.view import View
from strata.errors import Conflict, QuotaExceeded, Unavailable
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Fate
from strata.testing.virtual_time import in_virtual_time
from tests.not_none import not_none
from tests.unit.coordinator.rig import KEYS, Rig, Scripted, in_rig, now, rig


def claim(name: str, who: bytes) -> Txn:
    key = KEYS.root + name
    return Txn(compares=(absent(key),), success=(Put(key=key, value=who),))


class Claim:
    """Create `name` as `who`, or be refused if it exists with another value. `decisions` counts the calls."""

    def __init__(self, name: str, who: bytes = b"me") -> None:
        self.key = KEYS.root + name
        self.name, self.who = name, who
        self.decisions = 0

    def __call__(self, view: View) -> Decision:
        self.decisions += 1
        kv = view.get(self.key)
        if kv is None:
            return Decision(reason="free", txn=claim(self.name, self.who))
        if kv.value == self.who:
            return Decision(reason="mine")
        return Decision(reason="taken", refusal=Conflict(f"{kv.value.decode()} holds it"))


@in_rig(rig)
async def test_the_executor_returns_once_the_view_shows_the_write(r: Rig) -> None:
    r.network.begin()
    decide = Claim("a")
    await r.executor.settle(decide)
    assert r.get("a") == b"me"
    assert decide.decisions == 2
    assert r.network.reads == 0, "the transaction's own answer was fresh enough"


@in_virtual_time()
async def test_a_refusal_from_an_old_view_is_checked_first() -> None:
    async with rig(network=Scripted(watch_s=1.0)) as r:
        await r.mirror.at_least(r.put("a", b"other"))
        revision = r.delete("a")
        assert r.get("a") == b"other", "the view is behind"
        await r.executor.settle(Claim("a"))
        assert r.get("a") == b"me"
        assert r.mirror.view.revision > revision


@in_rig(rig)
async def test_a_decision_without_a_write_is_confirmed_on_a_fresh_view(r: Rig) -> None:
    await r.mirror.at_least(r.put("a", b"me"))
    r.network.begin()
    await r.executor.settle(Claim("a"))
    assert (r.network.executed, r.network.reads) == (0, 1)


@in_rig(rig)
async def test_a_decision_that_lost_a_race_is_made_again_and_refused(r: Rig) -> None:
    r.network.begin(Fate(delay_s=0.1))
    async with asyncio.TaskGroup() as tasks:
        settling = tasks.create_task(outcome(r.executor.settle(Claim("a"))))
        await asyncio.sleep(0.05)
        r.put("a", b"other")
    assert isinstance(settling.result(), Conflict)


async def outcome(work: object) -> BaseException | None:
    try:
        await work  # type: ignore[misc]  # any awaitable
    except Exception as error:  # noqa: BLE001  # handed to the test
        return error
    return None


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("coalesce", [False, True])
@in_rig(rig)
async def test_an_unknown_outcome_is_resolved_by_resending_the_transaction(
    r: Rig, lost: str, coalesce: bool
) -> None:
    r.network.begin(Fate(lost=lost), Fate(lost=lost))  # type: ignore[arg-type]
    await r.executor.settle(Claim("a"), coalesce=coalesce)
    assert r.network.executed == 3
    assert r.store.read(Range(key=KEYS.root + "a")).kvs[0].version == 1


@in_rig(rig)
async def test_a_request_that_arrives_late_does_not_count_twice(r: Rig) -> None:
    r.network.begin(Fate(delay_s=3.0))
    key = KEYS.root + "n"

    def add_one(view: View) -> Decision:
        kv = view.get(key)
        if kv is not None and kv.value == b"1":
            return Decision(reason="counted")
        txn = Txn(
            compares=(unchanged(key, view.mod_revision(key)),),
            success=(Put(key=key, value=b"1"),),
        )
        return Decision(reason="count", txn=txn)

    await r.executor.settle(add_one)
    await asyncio.sleep(5)
    assert r.store.read(Range(key=key)).kvs[0].version == 1


@in_rig(rig)
async def test_the_deadline_ends_a_write_as_unavailable(r: Rig) -> None:
    r.client.partition()
    before = now()
    with pytest.raises(Unavailable, match="within 3 s"):
        await r.executor.settle(Claim("a"), deadline_s=3)
    assert now() - before == pytest.approx(3)
    r.client.heal()


@in_rig(rig)
async def test_a_store_refusal_is_raised_to_the_caller(r: Rig) -> None:
    huge = Txn(success=(Put(key=KEYS.root + "a", value=b"x" * (2 << 20)),))
    for coalesce in (False, True):
        with pytest.raises(QuotaExceeded):
            await r.executor.settle(lambda _: Decision(reason="huge", txn=huge), coalesce=coalesce)


# -- coalescing -------------------------------------------------------------------------------


def revisions(store: MemoryStore, names: list[str]) -> list[int]:
    return [store.read(Range(key=KEYS.root + n)).kvs[0].mod_revision for n in names]


async def settle_all(r: Rig, decisions: list[Claim]) -> list[BaseException | None]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(outcome(r.executor.settle(d, coalesce=True))) for d in decisions]
    return [task.result() for task in running]


@in_rig(rig)
async def test_simultaneous_decisions_are_one_transaction(r: Rig) -> None:
    r.network.begin()
    names = [f"a{i}" for i in range(50)]
    assert await settle_all(r, [Claim(n) for n in names]) == [None] * 50
    assert r.network.executed == 1
    assert len(set(revisions(r.store, names))) == 1


@pytest.mark.parametrize(
    ("parts", "value_bytes", "transactions"), [(2 * MAX_BATCH + 1, 1, 3), (30, 60_000, 2)]
)
@in_rig(rig)
async def test_a_batch_is_bounded_in_operations_and_bytes(
    r: Rig, parts: int, value_bytes: int, transactions: int
) -> None:
    r.network.begin()
    await settle_all(r, [Claim(f"a{i}", b"x" * value_bytes) for i in range(parts)])
    assert r.network.executed == transactions


@in_rig(rig)
async def test_a_failed_transaction_of_a_batch_fails_only_its_own_caller(r: Rig) -> None:
    r.network.begin(Fate(delay_s=0.1))
    async with asyncio.TaskGroup() as tasks:
        settling = tasks.create_task(settle_all(r, [Claim(f"a{i}") for i in range(5)]))
        await asyncio.sleep(0.05)
        r.put("a2", b"other")
    results = settling.result()
    assert [type(e) for e in results] == [type(None)] * 2 + [Conflict] + [type(None)] * 2
    assert r.network.executed == 1 + 5


@in_rig(rig)
async def test_conflicting_decisions_run_concurrently(r: Rig) -> None:
    r.network.begin(*[Fate(delay_s=0.1)] * 50)
    began = now()
    results = await settle_all(r, [Claim("a", str(i).encode()) for i in range(50)])
    assert sorted(type(e).__name__ for e in results) == ["Conflict"] * 49 + ["NoneType"]
    assert now() - began < 0.3, "nobody waits in line for the others"


@pytest.mark.parametrize("guard", [absent(KEYS.root + "pins/a"), none_in(KEYS.root + "pins/")])
@pytest.mark.parametrize("first", ["pin", "delete"])
@in_rig(rig)
async def test_a_write_is_never_joined_with_a_compare_of_the_same_key(
    r: Rig, guard: Compare, first: str
) -> None:
    """If the two were joined, both compares would hold, and a pinned checkpoint would be deleted."""
    await r.mirror.at_least(r.put("record", b"committed"))
    record = KEYS.root + "record"

    def delete(view: View) -> Decision:
        if view.get(KEYS.root + "pins/a") is not None:
            return Decision(reason="pinned", refusal=Conflict("pinned"))
        kv = not_none(view.get(record))
        if kv.value == b"deleting":
            return Decision(reason="deleting")
        put = Put(key=record, value=b"deleting")
        same = unchanged(record, kv.mod_revision)
        return Decision(reason="delete", txn=Txn(compares=(guard, same), success=(put,)))

    def pin(view: View) -> Decision:
        kv = not_none(view.get(record))
        if kv.value == b"deleting":
            return Decision(reason="deleting", refusal=Conflict("deleting"))
        if view.get(KEYS.root + "pins/a") is not None:
            return Decision(reason="pinned")
        put = Put(key=KEYS.root + "pins/a", value=b"me")
        return Decision(reason="pin", txn=Txn(compares=(unchanged(record, kv.mod_revision),), success=(put,)))

    decisions = [pin, delete] if first == "pin" else [delete, pin]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(outcome(r.executor.settle(d, coalesce=True))) for d in decisions]
    assert [type(task.result()) for task in running] == [type(None), Conflict]
    assert (r.get("record") == b"deleting") == (r.get("pins/a") is None)


@in_rig(rig)
async def test_a_range_operation_runs_in_its_own_transaction(r: Rig) -> None:
    await r.mirror.at_least(r.put("old/a"))

    def clean(view: View) -> Decision:
        if view.get(KEYS.root + "old/a") is None:
            return Decision(reason="clean")
        return Decision(reason="clean", txn=Txn(success=(delete_prefix(KEYS.root + "old/"),)))

    r.network.begin()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(r.executor.settle(Claim("a"), coalesce=True))
        tasks.create_task(r.executor.settle(clean, coalesce=True))
        tasks.create_task(r.executor.settle(Claim("b"), coalesce=True))
    assert r.network.executed == 3
    assert r.get("old/a") is None


@in_rig(rig)
async def test_a_cancelled_decision_does_not_delay_the_others(r: Rig) -> None:
    r.network.begin(Fate(delay_s=0.2))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(r.executor.settle(Claim("first"), coalesce=True))
        await asyncio.sleep(0)
        quitter = tasks.create_task(r.executor.settle(Claim("quitter"), coalesce=True))
        other = tasks.create_task(r.executor.settle(Claim("other"), coalesce=True))
        await asyncio.sleep(0.1)
        quitter.cancel()
    assert other.exception() is None
    assert (r.get("quitter"), r.get("other")) == (None, b"me")
