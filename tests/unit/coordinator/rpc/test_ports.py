"""Clients that live while a hand-over between replicas is slow: at the leader, or at another replica."""

from __future__ import annotations

import asyncio

import pytest

from strata.config import CoordinatorConfig
from strata.core.kv.txn import Delete, Put, Txn
from strata.errors import StrataError
from strata.testing import replicas
from strata.testing.network import Call, Fate, PromptNetwork
from strata.testing.virtual_time import in_virtual_time
from tests.not_none import not_none
from tests.unit.coordinator.rig import given_up, in_rig, now
from tests.unit.coordinator.serving_rig import JOB, Cluster, cluster
from tests.unit.coordinator.unary_client import Client

KEY = JOB.worker("w0")


class Network(PromptNetwork):
    """Delay or lose the writes and the deletions of one worker's key."""

    def __init__(self) -> None:
        self.put: Fate | None = None
        self.puts_left = 1 << 30
        self.delete: Fate | None = None
        self.deleting = asyncio.Event()

    def fate(self, call: Call) -> Fate:
        operations = call.argument.success if isinstance(call.argument, Txn) else ()
        if any(isinstance(o, Put) and o.key == KEY for o in operations) and self.put is not None:
            self.puts_left -= 1
            return self.put if self.puts_left >= 0 else Fate()
        if any(isinstance(o, Delete) and o.key == KEY for o in operations):
            self.deleting.set()
            return self.delete or Fate()
        return Fate()


async def behind(c: Cluster) -> Network:
    """Start r1 behind the returned network, and r2 on a network without delays."""
    network = Network()
    await c.start("r1", network=network)
    await c.start("r2")
    return network


def detecting_in(monkeypatch: pytest.MonkeyPatch, detect_s: float) -> None:
    monkeypatch.setattr(replicas, "CoordinatorConfig", lambda: CoordinatorConfig(detect_s=detect_s))


@pytest.mark.parametrize(("detect_s", "write_s"), [(5.0, 0.3), (10.0, 0.0), (20.0, 0.0)])
@in_virtual_time()
async def test_a_client_served_elsewhere_survives_a_late_hand_over(
    monkeypatch: pytest.MonkeyPatch, detect_s: float, write_s: float
) -> None:
    """When the hand-over takes effect, its replica has had no heartbeat for `detect_s`: another replica got them."""
    detecting_in(monkeypatch, detect_s)
    async with cluster(0, members=1) as c:
        late, other = Network(), Network()
        c.add("r1", network=late)
        c.add("r2", network=other)
        await c.start("r3")
        client = Client(c, "w0")
        await client.register("r2")
        other.put = Fate(delay_s=write_s)
        c.partition("r1", "r2")
        await asyncio.sleep(1.5)
        late.put, late.puts_left = Fate(delay_s=0.5 + detect_s - 0.05), 1
        takes_effect = now() + late.put.delay_s
        await given_up(client.heartbeat("r1"), 0.5)
        heartbeat_s = c["r1"].context.timing.heartbeat_s
        beat_at = takes_effect - 0.05 * heartbeat_s
        while beat_at - heartbeat_s > now():
            beat_at -= heartbeat_s
        before = client.incarnation
        for _ in range(40):
            await asyncio.sleep(max(0.0, beat_at - now()))
            beat_at += heartbeat_s
            await client.heartbeat("r2")
            assert not_none(c.worker("w0")).create_revision == before


@pytest.mark.parametrize("newcomer_at", ["r1", "r3"])
@in_virtual_time()
async def test_a_client_that_was_handed_over_late_is_not_superseded_at_once(
    monkeypatch: pytest.MonkeyPatch, newcomer_at: str
) -> None:
    """Another replica answered the client a moment before, so its silence at the new replica proves nothing."""
    detecting_in(monkeypatch, 5.0)
    async with cluster(0, members=1) as c:
        late = Network()
        c.add("r1", network=late)
        c.add("r2")
        await c.start("r3")
        client = Client(c, "w0", "boot-a")
        await client.register("r2")
        c.partition("r1", "r2")
        await asyncio.sleep(1.5)
        late.put, late.puts_left = Fate(delay_s=5.45), 1
        takes_effect = now() + late.put.delay_s
        await given_up(client.heartbeat("r1"), 0.5)
        for beat in range(5):
            await asyncio.sleep(max(0.0, takes_effect - 4.05 + beat - now()))
            await client.heartbeat("r2")
        await asyncio.sleep(takes_effect + 0.1 - now())
        before = client.incarnation
        with pytest.raises(StrataError):
            await Client(c, "w0", "boot-b").register(newcomer_at)
        await client.heartbeat("r2")
        assert client.incarnation == before


@pytest.mark.parametrize("detect_s", [5.0, 20.0])
@in_virtual_time()
async def test_a_client_that_dies_during_a_late_hand_over_is_removed_in_time(
    monkeypatch: pytest.MonkeyPatch, detect_s: float
) -> None:
    detecting_in(monkeypatch, detect_s)
    async with cluster(0, members=1) as c:
        late = await behind(c)
        client = Client(c, "w0", "boot-a")
        await client.register("r2")
        c.partition("r1", "r2")
        await asyncio.sleep(1.5)
        late.put, late.puts_left = Fate(delay_s=0.3 * detect_s + 0.5), 1
        takes_effect = now() + late.put.delay_s
        await given_up(client.heartbeat("r1"), 0.5)
        while now() < takes_effect - 0.3:
            await client.heartbeat("r2")
            await asyncio.sleep(0.25)
        await c["r1"].see(lambda _view: c.worker("w0") is None)
        grace_s = c["r1"].context.timing.reconnect_grace_s
        assert detect_s < now() - takes_effect < detect_s + grace_s + 0.5


@pytest.mark.parametrize("another", [False, True])
@in_virtual_time()
async def test_another_boot_of_the_same_member_does_not_delay_its_removal(
    monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    detecting_in(monkeypatch, 20.0)
    async with cluster(3, members=1) as c:
        member = await c.member("w0", boot="boot-b").connect("r2")
        other = asyncio.create_task(Client(c, "w0", "boot-a").register("r1")) if another else None
        await asyncio.sleep(3)
        if other is not None:
            other.cancel()
            await asyncio.wait([other])
        await asyncio.sleep(19)
        member.dial("r1")
        await member.next("welcome")
        await asyncio.sleep(0.5)
        member.drop()
        died_at = now()
        await c["r1"].see(lambda _view: c.worker("w0") is None)
        assert now() - died_at < 1.5


@pytest.mark.parametrize("detect_s", [5.0, 20.0])
@in_virtual_time()
async def test_a_failed_call_proves_a_client_alive_for_five_seconds_once(
    monkeypatch: pytest.MonkeyPatch, detect_s: float
) -> None:
    detecting_in(monkeypatch, detect_s)
    async with cluster(0, members=1) as c:
        network = await behind(c)
        client = Client(c, "w0", "boot-a")
        await client.register("r2")
        c["r2"].kill()
        network.put = Fate(delay_s=0.2, lost="request")
        await given_up(client.heartbeat("r1"), 0.5)
        last_seen = []
        for _ in range(int(2 * (detect_s + 6))):
            last_seen.append(c["r1"].service.failure_detector.has_recent_transport("job", "w0", "boot-a"))
            await asyncio.sleep(0.5)
        assert last_seen == sorted(last_seen, reverse=True), "not again"
        assert 9 <= sum(last_seen) <= 11


@in_rig(cluster, 0, members=1)
async def test_a_lost_deletion_is_not_repeated_once_its_member_has_reconnected(c: Cluster) -> None:
    network = await behind(c)
    member = await c.member("w0").connect("r2")
    before = member.incarnation
    member.drop()
    c["r2"].kill()
    network.delete = Fate(delay_s=0.9, lost="request")
    await network.deleting.wait()
    network.put = Fate(delay_s=5.0)
    await asyncio.sleep(0.1)
    member.dial("r1")
    await asyncio.sleep(1.0)
    network.delete = None
    await asyncio.sleep(8.0)
    assert not_none(c.worker("w0")).create_revision == before


@pytest.mark.parametrize("pause_s", [0.3, 1.8, 4.2])
@in_rig(cluster, 0, members=1)
async def test_a_member_that_keeps_redialling_until_welcomed_is_not_deleted(
    c: Cluster, pause_s: float
) -> None:
    network = await behind(c)
    member = await c.member("w0").connect("r2")
    before, began = member.incarnation, now()
    network.put = Fate(delay_s=60.0)
    c["r2"].kill()
    welcomed = False
    while not welcomed:
        if now() - began > 15:
            network.put = None
        member.dial("r1")
        await member.until(lambda: member.over.is_set() or member.all("welcome"))
        welcomed = bool(member.all("welcome"))
        await asyncio.sleep(pause_s)
    assert member.incarnation == before


@in_rig(cluster, 0, members=1)
async def test_a_second_process_of_the_same_name_does_not_get_the_first_deleted(c: Cluster) -> None:
    """A member that was served lately may return before its key is deleted, whoever used its name meanwhile."""
    network = await behind(c)
    member = await c.member("w0", boot="boot-a").connect("r2")
    before = member.incarnation
    network.put = Fate(delay_s=60.0)
    c["r2"].kill()
    member.drop()
    await asyncio.sleep(7)  # 5 s until the lease of r2 expires, 5 s until its members are deleted
    member.dial("r1")
    await asyncio.sleep(0.5)
    member.drop()
    other = c.member("w0", boot="boot-b")
    other.dial("r1")
    await asyncio.sleep(0.3)
    other.drop()
    await asyncio.sleep(3.2)
    assert not network.deleting.is_set()
    assert not_none(c.worker("w0")).create_revision == before


@in_rig(cluster, 0, members=1)
async def test_a_member_that_connected_once_and_died_is_still_deleted(c: Cluster) -> None:
    network = await behind(c)
    member = await c.member("w0").connect("r2")
    network.put = Fate(delay_s=60.0)
    c["r2"].kill()
    member.dial("r1")
    await asyncio.sleep(0.5)
    member.drop()
    died_at = now()
    await c["r1"].see(lambda _view: c.worker("w0") is None)
    assert 5 <= now() - died_at < 12
