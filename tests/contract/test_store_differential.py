"""Random programs on the in-memory store and on etcd, in lockstep: both stores must give the same answers.

Revisions are relative to the store's revision at the start, leases are numbered in the order of their grants. This
test is meant to find cases that the hand-written tests beside it omit.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from strata.core.kv.store import Store
from strata.core.kv.txn import (
    Compare,
    Delete,
    KeyValue,
    Op,
    Operation,
    Put,
    Range,
    RangeResult,
    Target,
    Txn,
    TxnResult,
    prefix_end,
)
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.errors import StrataError
from strata.etcd import EtcdStore
from strata.testing.memory_store import MemoryStore

NAMES = ["", "a", "aa", "ab", "b", "c"]
LEASES = 3
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Grant:
    """Grant a lease; later commands name it by its number in the order of grants."""


@dataclass(frozen=True, slots=True)
class Revoke:
    lease: int


@dataclass(frozen=True, slots=True)
class Compact:
    revision: int


Command = Txn | Range | Grant | Revoke | Compact


# Programs use relative names, leases (1 to LEASES, 9 for one that never existed) and
# revisions (1 is the first write of the program).

names = st.sampled_from(NAMES[1:])
ends = st.one_of(st.none(), st.none(), st.sampled_from([*NAMES[1:], "d"]))
values = st.sampled_from([b"", b"x", b"y"])
revisions = st.integers(1, 8)
leases = st.sampled_from([0, 0, 0, 1, 1, 2, 2, 3, 9])


def _operand(target: Target) -> st.SearchStrategy[int | bytes]:
    if target is Target.VALUE:
        return values
    if target is Target.LEASE:
        return leases
    return st.integers(0, 4) if target is Target.VERSION else st.integers(0, 8)


compares = st.sampled_from(list(Target)).flatmap(
    lambda target: st.builds(
        Compare,
        key=names,
        range_end=ends,
        target=st.just(target),
        # leases are compared for equality only: the order of their ids differs between the two stores
        op=st.sampled_from([Op.EQUAL, Op.NOT_EQUAL] if target is Target.LEASE else list(Op)),
        operand=_operand(target),
    )
)
ranges = st.builds(
    Range,
    key=names,
    range_end=ends,
    revision=st.one_of(st.just(0), revisions),
    limit=st.integers(0, 3),
    keys_only=st.booleans(),
)
operations: st.SearchStrategy[Operation] = st.one_of(
    st.builds(Put, key=names, value=values, lease=leases),
    st.builds(Put, key=names, value=values),
    st.builds(Delete, key=names, range_end=ends),
    ranges,
)
branches = st.lists(operations, max_size=4).map(tuple)
txns = st.builds(Txn, compares=st.lists(compares, max_size=2).map(tuple), success=branches, failure=branches)
commands: st.SearchStrategy[Command] = st.one_of(
    txns,
    txns,
    txns,
    ranges,
    st.builds(Grant),
    st.builds(Revoke, st.integers(1, LEASES)),
    st.builds(Compact, st.integers(1, 5)),
)
# Programs begin with two leases and a few writes, so that there are old revisions to read, compare and compact.
preludes = st.lists(
    st.builds(Put, key=names, value=values, lease=st.integers(0, 2)).map(lambda put: Txn(success=(put,))),
    min_size=3,
    max_size=6,
)
programs: st.SearchStrategy[list[Command]] = st.tuples(
    preludes, st.lists(commands, min_size=3, max_size=20)
).map(lambda parts: [Grant(), Grant(), *parts[0], *parts[1]])


@dataclass
class Runner:
    """Runs a program on one store and translates the store's answers into the program's own terms."""

    store: Store
    prefix: str
    base: int
    leases: list[int] = field(default_factory=list)

    # -- from the program's terms to the store's ---------------------------------------------------

    def key(self, name: str) -> str:
        return self.prefix + name

    def end(self, name: str | None) -> str | None:
        return None if name is None else self.prefix + name

    def revision(self, relative: int) -> int:
        return self.base + relative if relative else 0

    def lease(self, number: int) -> int:
        if number == 0:
            return 0
        return self.leases[number - 1] if number <= len(self.leases) else 4711

    def compare(self, compare: Compare) -> Compare:
        operand = compare.operand
        if compare.target is Target.LEASE:
            operand = self.lease(int(operand))
        elif compare.target in {Target.CREATE, Target.MOD}:
            operand = self.revision(int(operand))
        return replace(
            compare, key=self.key(compare.key), range_end=self.end(compare.range_end), operand=operand
        )

    def operation(self, operation: Operation) -> Operation:
        if isinstance(operation, Put):
            return replace(operation, key=self.key(operation.key), lease=self.lease(operation.lease))
        if isinstance(operation, Delete):
            return replace(operation, key=self.key(operation.key), range_end=self.end(operation.range_end))
        return self.range(operation)

    def range(self, request: Range) -> Range:
        return replace(
            request,
            key=self.key(request.key),
            range_end=self.end(request.range_end),
            revision=self.revision(request.revision),
        )

    def txn(self, txn: Txn) -> Txn:
        return Txn(
            compares=tuple(map(self.compare, txn.compares)),
            success=tuple(map(self.operation, txn.success)),
            failure=tuple(map(self.operation, txn.failure)),
        )

    # -- and back ------------------------------------------------------------------------------------

    def seen(self, kv: KeyValue) -> tuple[Any, ...]:
        lease = self.leases.index(kv.lease) + 1 if kv.lease else 0
        created = kv.create_revision - self.base if kv.create_revision else None
        name = kv.key.removeprefix(self.prefix)
        return name, kv.value, created, kv.mod_revision - self.base, kv.version, lease

    def read(self, result: RangeResult) -> tuple[Any, ...]:
        return result.revision - self.base, tuple(map(self.seen, result.kvs)), result.more

    def done(self, result: TxnResult) -> tuple[Any, ...]:
        return result.succeeded, result.revision - self.base, tuple(map(self.read, result.reads))

    async def run(self, command: Command) -> object:
        """Execute one command and return its answer; an error's answer is the name of its class."""
        try:
            match command:
                case Txn():
                    return self.done(await self.store.execute(self.txn(command)))
                case Range():
                    return self.read(await self.store.read(self.range(command)))
                case Grant():
                    if len(self.leases) < LEASES:
                        self.leases.append((await self.store.grant(600)).id)
                    return None
                case Revoke():
                    await self.store.revoke(self.lease(command.lease))
                    return None
                case Compact():
                    await self.store.compact(self.revision(command.revision))
                    return None
        except StrataError as error:
            return type(error).__name__

    async def history(self, start: int) -> list[object]:
        """Return all events from a revision on, as a watch delivers them."""
        sentinel = Put(key=self.key("end"), value=b"")
        last = (await self.store.execute(Txn(success=(sentinel,)))).revision
        events: list[object] = []
        end = prefix_end(self.prefix)
        async with self.store.watch(self.prefix, end, start_revision=self.base + start) as batches:
            async for batch in batches:
                events += [(event.deleted, self.seen(event.kv)) for event in batch.events]
                if batch.revision >= last:
                    return events
        raise AssertionError("the watch ended")

    async def clean_up(self) -> None:
        for lease in self.leases:
            await self.store.revoke(lease)


async def make_runner(store: Store) -> Runner:
    prefix = f"/differential/{next(_numbers):06}/"
    return Runner(store, prefix, (await store.read(Range(key=prefix))).revision)


async def lockstep(etcd: Store, program: list[Command], *, replay: bool) -> Mapping[str, int]:
    """Run a program on both stores; with `replay`, also compare the events that watches deliver (0.1 s on etcd)."""
    memory_store = MemoryStore()
    runners = [await make_runner(memory_store.client(progress_s=0.5)), await make_runner(etcd)]
    outcomes: dict[str, int] = {}
    compacted = 0
    for step, command in enumerate(program):
        one, two = [await runner.run(command) for runner in runners]
        assert one == two, f"step {step}: {command}\nmemory: {one}\netcd:   {two}"
        if isinstance(command, Compact) and one is None:
            compacted = max(compacted, command.revision)
        kind = one if isinstance(one, str) else type(command).__name__
        outcomes[kind] = outcomes.get(kind, 0) + 1
    if replay:
        async with asyncio.timeout(20):
            memory, real = [await runner.history(max(compacted, 1)) for runner in runners]
        assert memory == real
    await runners[1].clean_up()
    return outcomes


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.slow
@pytest.mark.timeout(600)  # the thorough profile runs 5,000 programs
def test_both_stores_give_the_same_answers_to_every_random_program(
    loop: asyncio.Runner, single_etcd: EtcdCluster
) -> None:
    etcd = loop.run(_connect(single_etcd))
    outcomes: dict[str, int] = {}

    @hypothesis.given(program=programs, dice=st.integers(0, 9))
    def check(program: list[Command], dice: int) -> None:
        for kind, count in loop.run(lockstep(etcd, program, replay=dice == 7)).items():
            outcomes[kind] = outcomes.get(kind, 0) + count

    thorough = hypothesis.settings()
    hypothesis.settings(max_examples=max(400, thorough.max_examples))(check)()
    loop.run(etcd.close())
    # The programs are useful only if each of these events occurs often enough.
    assert {
        "Txn",
        "Range",
        "Revoke",
        "Compact",
        "InvalidArgument",
        "NotFound",
        "Compacted",
    } <= outcomes.keys()


async def _connect(cluster: EtcdCluster) -> EtcdStore:
    return await EtcdStore.connect(cluster.endpoints)
