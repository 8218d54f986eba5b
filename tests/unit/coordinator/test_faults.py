"""Replicas under loss, delay, partition and crash, seeded: one leader an epoch, and a true end.

The simulation of whole clusters is elsewhere; here are only replicas and keys, so that a failure
of their own runtime shows itself small.
"""

from __future__ import annotations

import asyncio
import random
import uuid

import pytest

from strata.core.ids import BootId, InstanceId, WorkerId
from strata.core.invariants import check
from strata.core.job import JobView
from strata.core.members import decide_leave, decide_register
from strata.core.records import (
    Assignment,
    DatasetSpec,
    JobSpec,
    Replica,
    WorldHead,
    decode,
    encode,
)
from strata.core.registration import Registration
from strata.core.txn import Put, Range, Txn, WatchBatch
from strata.core.view import View
from strata.errors import Refused, Unavailable
from strata.testing.memory_store import MemoryStore
from strata.testing.mvcc import Revision
from strata.testing.network import Call, Fate, PromptNetwork
from strata.testing.virtual_time import in_virtual_time
from tests.unit.coordinator.rig import now
from tests.unit.coordinator.serving_rig import JOB, KEYS, Cluster, Node

SERVER = InstanceId("serves-the-members")
CHAOS_S = 60.0


class Bad(PromptNetwork):
    """Loses and delays, until it is told to be good."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.good = False
        self.faults = 0

    def fate(self, call: Call) -> Fate:
        if self.good:
            return Fate()
        chance = self.rng.random()
        self.faults += chance < 0.12
        if chance < 0.04:
            return Fate(lost="request", delay_s=self.rng.uniform(0, 1))
        if chance < 0.08:
            return Fate(lost="answer", delay_s=self.rng.uniform(0, 1))
        if chance < 0.12:
            return Fate(delay_s=self.rng.uniform(1, 15))
        return Fate(delay_s=self.rng.expovariate(200), answer_delay_s=self.rng.expovariate(200))

    def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
        late = not self.good and self.rng.random() < 0.05
        return self.rng.uniform(0, 5) if late else 0.0


class Witness:
    """Sees every write as it happens: what carries an epoch was written in that epoch."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.epochs: set[int] = set()
        self.heads: list[WorldHead] = []
        self.wrong: list[str] = []
        store.subscribe(self.see)

    def see(self, written: Revision) -> None:
        leader = self.store.read(Range(key=KEYS.leader)).kvs
        epoch = leader[0].create_revision if leader else 0
        self.epochs.add(epoch)
        if leader and leader[0].version != 1:
            self.wrong.append("the leader key was overwritten")
        for event in written.events:
            if event.deleted:
                continue
            if event.kv.key == JOB.head:
                head = decode(WorldHead, event.kv.value)
                before = self.heads[-1].generation if self.heads else 0
                if (head.epoch, head.generation) != (epoch, before + 1):
                    self.wrong.append(f"in epoch {epoch}, after generation {before}: {head}")
                self.heads.append(head)
            elif event.kv.key == JOB.assignment("d"):
                record = decode(Assignment, event.kv.value)
                if record.epoch != epoch:
                    self.wrong.append(f"in epoch {epoch}: {record}")


class Chaos:
    """Registers and removes members, crashes and cuts off replicas, at random."""

    def __init__(self, f: Cluster, rng: random.Random) -> None:
        self.f, self.rng = f, rng
        self.networks: list[Bad] = []
        self.members: set[str] = set()
        self.harm = 0
        self.names = iter(range(1, 1000))

    def add(self) -> None:
        network = Bad(self.rng)
        self.networks.append(network)
        self.f.add(f"r{next(self.names)}", network=network)

    async def member(self, node: Node) -> None:
        """Add or remove one member through `node`, if it can."""
        name = f"w{self.rng.randrange(4)}"
        try:
            if name in self.members:
                held = JobView(node.view, JOB).worker(name)
                revision = held.create_revision if held is not None else 1
                await node.context.executor.settle(
                    lambda view: decide_leave(JobView(view, JOB), WorkerId(name), revision),
                    deadline_s=5,
                )
            else:
                registration = Registration(
                    worker=WorkerId(name),
                    boot=BootId(str(uuid.UUID(int=self.rng.getrandbits(128)))),
                    spec=JobSpec(max_workers=4, settle_s=0.5, max_fruitless_generations=10_000),
                )
                await node.context.executor.settle(
                    lambda view: decide_register(JobView(view, JOB), registration, served_by=SERVER),
                    deadline_s=5,
                )
        except (Unavailable, Refused):
            pass  # it may take effect all the same, and so may the one before it
        worker = self.f.store.read(Range(key=JOB.worker(name))).kvs
        self.members = (self.members | {name}) if worker else (self.members - {name})

    async def one(self) -> None:
        node = self.rng.choice(self.f.alive)
        what = self.rng.random()
        if what < 0.7:
            async with asyncio.timeout(6):
                await self.member(node)
            return
        self.harm += 1
        if what < 0.8 and len(self.f.alive) >= 3:
            await node.crash()
            self.add()
        elif what < 0.9:
            await node.stop()
            self.add()
        else:
            node.client.partition()
            await asyncio.sleep(self.rng.uniform(0, 12))
            node.client.heal()

    def calm(self) -> None:
        for network in self.networks:
            network.good = True
        for node in self.f.alive:
            node.client.heal()


def settled(view: View) -> bool:
    """Tell whether the world consists of exactly the members that are registered."""
    job = JobView(view, JOB)
    world = job.world()
    alive = {(w.name, w.create_revision) for w in job.workers()}
    inside = {(m.worker, m.incarnation) for m in world.members} if world is not None else set()
    return alive == inside


@pytest.mark.parametrize("seed", range(40))
def test_replicas_come_through_random_faults(seed: int) -> None:
    @in_virtual_time(seed=seed, limit_s=3600)
    async def scenario() -> None:
        store = MemoryStore()
        for key, record in (
            (KEYS.replica("keeper"), Replica(instance=SERVER, address="k:1")),
            (JOB.dataset_spec("d"), DatasetSpec(shards=7)),
        ):
            store.execute(Txn(success=(Put(key=key, value=encode(record)),)))
        witness = Witness(store)
        async with asyncio.TaskGroup() as tasks:
            f = Cluster(tasks, idle=True, store=store)
            chaos = Chaos(f, random.Random(seed))
            for _ in range(3):
                chaos.add()
            end = now() + CHAOS_S
            while now() < end:
                await asyncio.sleep(chaos.rng.uniform(0, 1))
                await chaos.one()
            chaos.calm()
            await asyncio.sleep(40)  # the longest delay, a lease, settling, all of it over
            leaders = [n for n in f.alive if n.leads]
            assert len(leaders) == 1
            assert leaders[0].replica.is_ready()[0]
            for node in f.alive:
                await node.context.mirror.fresh()
                assert check(node.view, KEYS) == []
                assert node.context.mirror.differences == 0
                assert settled(node.view)
            assert chaos.harm + sum(n.faults for n in chaos.networks) >= 5
            for node in f.alive:
                assert node.task is not None
                node.task.cancel()
        assert witness.wrong == []
        assert len(witness.epochs) > 1
        assert witness.heads

    scenario()
