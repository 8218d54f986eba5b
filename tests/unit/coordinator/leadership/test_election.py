"""The election: one leader an epoch, the next leader immediately, and no leader whose lease has expired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from strata.coordinator.leadership.controller_watchdog import ControllerWatchdog
from strata.coordinator.leadership.election import Election
from strata.coordinator.writes.fence import Fence
from strata.core.ids import Epoch, InstanceId, ReplicaId
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import Leader, decode, encode
from strata.core.kv.txn import Delete, Put, Range, Txn, absent
from strata.core.leadership.leader import resign_txn
from strata.errors import NotLeader, Refused
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Call, Fate, PromptNetwork
from strata.testing.virtual_time import in_virtual_time
from tests.unit.coordinator.rig import KEYS, Moment, Rig, Scripted, in_rig, now, put, rig, writes


class Candidate:
    """A rig with an election; its world controller is a task that feeds the watchdog, until `stuck`."""

    def __init__(self, r: Rig, name: str) -> None:
        self.rig = r
        self.name = name
        self.skew_s = 0.0
        """Seconds added to the candidate's clock: a suspend that the loop's clock did not count."""
        self.stuck = False
        self.heartbeat = ControllerWatchdog(lambda: now() + self.skew_s)
        self.election = Election(
            renewals=r.client,
            mirror=r.mirror,
            executor=r.executor,
            keys=KEYS,
            instance=InstanceId(f"instance-{name}"),
            replica=ReplicaId(name),
            heartbeat=self.heartbeat,
            clock=lambda: now() + self.skew_s,
        )
        self.campaigning: asyncio.Task[None] | None = None
        self.since = Epoch(0)

    def leads(self) -> bool:
        return self.election.epoch is not None

    def fence(self, epoch: Epoch) -> Fence:
        return Fence(
            store=self.rig.client,
            mirror=self.rig.mirror,
            keys=KEYS,
            term=self.election,
            epoch=epoch,
        )

    async def retire(self) -> None:
        """Stop the campaign and resign, as a replica does at its shutdown."""
        assert self.campaigning is not None
        self.campaigning.cancel()
        await asyncio.wait([self.campaigning])
        await self.election.resign()

    async def beat(self) -> None:
        while True:
            if not self.stuck:
                self.heartbeat.beat()
            await asyncio.sleep(0.5)


@asynccontextmanager
async def candidate(
    store: MemoryStore, name: str = "r1", network: PromptNetwork | None = None
) -> AsyncIterator[Candidate]:
    async with rig(store, name=name, network=network) as r, asyncio.TaskGroup() as tasks:
        made = Candidate(r, name)
        made.campaigning = tasks.create_task(made.election.run(address=f"{name}:1"))
        running = [made.campaigning, tasks.create_task(made.beat())]
        yield made
        for task in running:
            task.cancel()


@asynccontextmanager
async def office() -> AsyncIterator[Candidate]:
    """Run a candidate that leads, in its first term."""
    async with candidate(MemoryStore()) as made:
        made.since = await made.election.elected()
        yield made


def leader_key(store: MemoryStore, keys: ClusterKeys = KEYS) -> tuple[str, int] | None:
    kvs = store.read(Range(key=keys.leader)).kvs
    return (decode(Leader, kvs[0].value).replica, kvs[0].create_revision) if kvs else None


@in_virtual_time()
async def test_one_of_three_leads(store: MemoryStore) -> None:
    async with AsyncExitStack() as stack:
        three = [await stack.enter_async_context(candidate(store, f"r{i}")) for i in (1, 2, 3)]
        await asyncio.sleep(30)
        (leader,) = [c for c in three if c.leads()]
        assert leader_key(store) == (leader.name, leader.election.epoch)
        assert store.read(Range(key=KEYS.leader)).kvs[0].version == 1, "never overwritten"


@in_rig(office)
async def test_a_resigned_leader_is_followed_at_once(first: Candidate) -> None:
    async with candidate(first.rig.store, "r2") as second:
        await asyncio.sleep(10)
        assert not second.leads()
        before = now()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(first.retire())
            assert await second.election.elected() > first.since
        assert now() - before < 0.01
        assert not first.leads()


@in_rig(office)
async def test_a_leader_cut_off_stops_by_itself_before_the_next_one_begins(first: Candidate) -> None:
    async with candidate(first.rig.store, "r2") as second:
        await asyncio.sleep(10)
        first.rig.client.partition()
        cut_at = now()
        await first.election.ended(first.since)
        assert now() - cut_at <= 4.01, "two thirds of the lease"
        assert not second.leads()
        await second.election.elected()
        assert now() - cut_at <= 6.1, "the lease, anchored at its last renewal"
        first.rig.client.heal()
        await asyncio.sleep(30)
        assert second.leads()
        assert not first.leads()


@in_rig(office)
async def test_time_spent_suspended_ends_the_leader_term(only: Candidate) -> None:
    assert only.leads()
    only.skew_s = 4.5  # the host was suspended
    assert only.election.epoch is None, "asked before each act, without waiting for a timer"
    with pytest.raises(NotLeader):
        await only.fence(only.since).execute(Txn())
    await only.election.ended(only.since)


@in_rig(office)
async def test_a_stuck_world_controller_lets_the_lease_run_out(first: Candidate) -> None:
    async with candidate(first.rig.store, "r2") as second:
        await asyncio.sleep(10)
        first.stuck = True
        stuck_at = now()
        await first.election.ended(first.since)
        assert 4 <= now() - stuck_at <= 7
        await asyncio.sleep(1)
        assert first.leads() or second.leads()


@in_rig(office)
async def test_waiting_for_etcd_counts_as_turning(only: Candidate) -> None:
    only.stuck = True
    with only.heartbeat.waiting():
        await asyncio.sleep(60)
    only.stuck = False
    await asyncio.sleep(60)
    assert only.election.epoch == only.since


def delete_key(store: MemoryStore) -> None:
    store.execute(Txn(success=(Delete(key=KEYS.leader),)))


def revoke_leases(store: MemoryStore) -> None:
    for lease in list(store.state.leased):
        store.revoke(lease)


@pytest.mark.parametrize("take_away", [delete_key, revoke_leases])
@in_rig(office)
async def test_a_leader_whose_key_or_lease_is_deleted_ends_its_term(
    only: Candidate, take_away: Callable[[MemoryStore], None]
) -> None:
    take_away(only.rig.store)
    await only.election.ended(only.since)
    assert await only.election.elected() > only.since


@in_virtual_time()
async def test_a_leader_term_ends_although_etcd_answers_keepalives_of_an_expired_lease() -> None:
    """etcd#15247: the answer reports a renewal although the lease has expired."""

    class Lying(MemoryStore):
        def keep_alive(self, lease_id: int) -> int:
            return 6

    store = Lying()
    async with candidate(store) as only:
        epoch = await only.election.elected()
        await only.election.ended(epoch)
        assert leader_key(store) is None or leader_key(store) != ("r1", epoch)


def is_campaign(call: Call) -> bool:
    return writes(call, KEYS.leader)


def once(fate: Fate) -> Scripted:
    """Return a network that applies `fate` to the first campaign."""
    return Scripted(meets=is_campaign, fates=[fate])


@pytest.mark.parametrize("fate", [Fate(lost="answer"), Fate(lost="request"), Fate(delay_s=3.0)])
@in_virtual_time()
async def test_a_campaign_with_an_unknown_outcome_still_gives_a_leader(
    store: MemoryStore, fate: Fate
) -> None:
    async with candidate(store, network=once(fate)) as only:
        epoch = await only.election.elected()
        await asyncio.sleep(20)
        assert only.election.epoch == epoch
        assert leader_key(store) == ("r1", epoch)


@in_virtual_time()
async def test_a_late_campaign_under_an_abandoned_lease_is_withdrawn(store: MemoryStore) -> None:
    async with candidate(store, "r1", network=once(Fate(delay_s=5.5))) as late:
        # Another replica led in between: r1 wins only when its late request arrives.
        store.execute(
            Txn(
                compares=(absent(KEYS.leader),),
                success=(
                    Put(
                        key=KEYS.leader,
                        value=encode(Leader(instance=InstanceId("x"), replica=ReplicaId("x"), address="x:1")),
                        lease=store.grant(5).id,
                    ),
                ),
            )
        )
        epoch = await late.election.elected()
        await asyncio.sleep(20)
        assert late.election.epoch == epoch
        assert leader_key(store) == ("r1", epoch)


@in_virtual_time()
async def test_no_leader_term_begins_before_the_view_has_caught_up(store: MemoryStore) -> None:
    key = KEYS.root + "jobs/x"
    network = Moment(is_campaign).network(
        lambda: put(store, key),
        watch_s=lambda batch: 0.5 if any(e.kv.key == key for e in batch.events) else 0.0,
    )
    async with rig(store, network=network) as r, asyncio.TaskGroup() as tasks:
        only = Candidate(r, "r1")
        running = tasks.create_task(only.election.run(address="r1:1"))
        await only.election.elected()
        assert r.mirror.view.get(key) is not None
        running.cancel()


@in_virtual_time()
async def test_no_leader_term_begins_with_a_deleted_key(store: MemoryStore) -> None:
    deletion = Txn(success=(Delete(key=KEYS.leader),))
    network = Moment(is_campaign).network(
        lambda: store.execute(deletion),
        watch_s=lambda batch: 0.5 if any(e.deleted for e in batch.events) else 0.0,
    )
    async with candidate(store, network=network) as only:
        epoch = await only.election.elected()
        assert leader_key(store) == ("r1", epoch)


# -- the fence --------------------------------------------------------------------------------


@in_rig(office)
async def test_a_deposed_leaders_fenced_write_fails_and_ends_its_term(first: Candidate) -> None:
    fence = first.fence(first.since)
    key = KEYS.root + "jobs/x"
    assert (await fence.execute(Txn(success=(Put(key=key, value=b"1"),)))).succeeded

    first.rig.client.network = Scripted(watch_s=1000.0)
    first.rig.store.execute(Txn(success=(Delete(key=KEYS.leader),)))
    assert first.leads(), "it does not know yet"
    with pytest.raises(NotLeader):
        await fence.execute(Txn(success=(Put(key=key, value=b"2"),)))
    assert not first.leads()
    assert first.rig.store.read(Range(key=key)).kvs[0].value == b"1"


@in_rig(office)
async def test_a_failed_compare_other_than_the_fence_keeps_the_leader_term(only: Candidate) -> None:
    key = KEYS.root + "jobs/x"
    only.rig.put("jobs/x")
    result = await only.fence(only.since).execute(
        Txn(compares=(absent(key),), success=(Put(key=key, value=b"mine"),))
    )
    assert not result.succeeded
    assert only.election.epoch == only.since
    assert only.rig.get("jobs/x") == b"{}", "the view shows why"


@in_rig(office)
async def test_a_fenced_write_with_an_unknown_outcome_is_sent_again(only: Candidate) -> None:
    key = KEYS.root + "jobs/x"
    only.rig.network.begin(Fate(lost="answer"), Fate(lost="answer"))
    result = await only.fence(only.since).execute(
        Txn(compares=(absent(key),), success=(Put(key=key, value=b"1"),))
    )
    assert not result.succeeded, "the first one took effect, so the same again does not"
    assert only.rig.get("jobs/x") == b"1"
    assert only.rig.store.read(Range(key=key)).kvs[0].version == 1


@in_rig(office)
async def test_a_fence_sends_no_write_after_its_lease_expires(only: Candidate) -> None:
    only.rig.client.partition()
    fence = only.fence(only.since)
    key = KEYS.root + "jobs/x"
    with pytest.raises(NotLeader):
        await fence.execute(Txn(success=(Put(key=key, value=b"1"),)))
    only.rig.client.heal()
    await asyncio.sleep(10)
    assert not only.rig.store.read(Range(key=key)).kvs


def refuse(call: Call) -> Fate:
    """Make etcd refuse this call, as after a role was revoked."""
    if call.kind in {"grant", "keep_alive", "execute"}:
        raise Refused("etcdserver: permission denied")
    return Fate()


@in_rig(office)
async def test_requests_refused_by_etcd_are_retried_until_they_succeed(only: Candidate) -> None:
    network = only.rig.network
    network.says = refuse
    await asyncio.sleep(3)
    network.says = lambda _call: Fate()
    await asyncio.sleep(10)
    assert only.election.epoch == only.since, "a renewal is retried within the lease"
    network.begin()
    network.says = refuse
    await only.election.ended(only.since)
    await asyncio.sleep(30)
    assert len(network.calls) < 100, "not in a busy loop"
    network.says = lambda _call: Fate()
    assert await only.election.elected() > only.since


@pytest.mark.parametrize("delay_s", [0.3, 3.0])
@in_virtual_time()
async def test_a_campaign_on_its_way_when_a_replica_stops_leaves_no_leader_behind(
    store: MemoryStore, delay_s: float
) -> None:
    async with candidate(store, "r1", network=once(Fate(delay_s=delay_s))) as stopping:
        await asyncio.sleep(0.1)
        await stopping.retire()
        await asyncio.sleep(delay_s + 0.1)
        assert leader_key(store) is None, "the lease that it hangs from is gone"
        async with candidate(store, "r2") as second:
            async with asyncio.timeout(1.0):
                await second.election.elected()


@pytest.mark.parametrize("mute", [{"execute"}, {"revoke"}, {"execute", "revoke"}])
@in_rig(office)
async def test_resigning_respects_its_callers_deadline_and_ends_the_leader_term(
    only: Candidate, mute: set[str]
) -> None:
    only.rig.network.says = lambda call: Fate(delay_s=30.0 if call.kind in mute else 0.0)
    began = now()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await only.retire()
    assert now() - began < 0.6
    assert not only.leads()
    assert (leader_key(only.rig.store) is None) is (len(mute) == 1), "by its own end, or by the lease's"


# -- a view that is late because of a slow or broken watch


@pytest.mark.parametrize("sees_its_key", [True, False])
@in_rig(office)
async def test_a_leader_whose_late_view_hides_its_deleted_key_stops_renewing(
    only: Candidate, sees_its_key: bool
) -> None:
    """A renewal counts only if the leader saw its key after the renewal. The lease itself lives on."""
    network = only.rig.network
    await asyncio.sleep(5)
    network.watch_s = 12.0
    if not sees_its_key:
        network.says = lambda call: Fate(lost="request" if call.kind == "read" else None)
    only.rig.store.execute(resign_txn(KEYS, only.since))  # as a follower does that deposes it
    async with asyncio.timeout(1.5 if sees_its_key else 4.1):  # two thirds of the lease
        await only.election.ended(only.since)
