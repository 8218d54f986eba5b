"""Links between replicas: which are dialled, which hellos are accepted, which peers count as ready."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from strata.core.access.authority import Identity, Role
from strata.core.kv.records import Replica, encode
from strata.errors import InvalidArgument, PermissionDenied, Unavailable
from strata.testing.serving import peer_address
from strata.testing.virtual_time import in_virtual_time
from strata.v1.members_pb2 import ListMembersRequest
from strata.v1.peers_pb2 import PeerDown, PeerHello, PeerUp
from tests.unit.coordinator.rig import in_rig, now
from tests.unit.coordinator.serving_rig import KEYS, Cluster, Member, cluster, in_world


async def ready(c: Cluster, name: str, peers: set[str]) -> float:
    """Return the time at which `name` counts exactly these replicas as ready."""
    while set(c[name].service.peers.ready_addresses()) != peers:  # noqa: ASYNC110  # the time is virtual
        await asyncio.sleep(0.01)
    return now()


@in_rig(cluster)
async def test_a_silent_peer_is_unready_after_a_second_and_ready_soon_after_its_return(c: Cluster) -> None:
    for link in c.board.links("r1", peer_address("r2")):
        link.stall()
    began = now()
    assert 0.4 < await ready(c, "r1", {"r3"}) - began <= 1.1
    assert await ready(c, "r1", {"r2", "r3"}) - began < 6.0, "the silent link is opened anew"


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        (PeerHello(replica="r2", instance="somebody"), Unavailable),
        (PeerHello(replica="unknown", instance="somebody"), Unavailable),
        (None, InvalidArgument),
    ],
    ids=["another instance", "an unknown replica", "no hello"],
)
@in_virtual_time()
async def test_only_a_registered_instance_is_welcome(hello: PeerHello | None, error: type[Exception]) -> None:
    async with cluster(2) as c, c.board.dial("me", peer_address("r1")) as link:
        link.send(PeerUp(hello=hello) if hello is not None else PeerUp())
        with pytest.raises(error):
            await link.recv()


@in_rig(cluster, 2)
async def test_a_replica_speaks_under_its_own_name_only(c: Cluster) -> None:
    """Other replicas rely on a peer's reports about itself."""
    r2 = c["r2"].context
    hello = PeerUp(hello=PeerHello(replica=r2.replica, instance=r2.instance))

    async def answer(identity: Identity | None) -> PeerDown | None:
        c.board.listen("door", partial(c["r1"].service.serve_peer, identity=identity), c.tasks.create_task)
        async with c.board.dial("me", "door") as link:
            link.send(hello)
            down: PeerDown | None = await link.recv()
            return down

    for identity in (None, coordinator("r2")):
        assert await answer(identity) is not None
    with pytest.raises(PermissionDenied, match="coordinator r3 is not replica r2"):
        await answer(coordinator("r3"))


def coordinator(name: str) -> Identity:
    return Identity(cluster="test", role=Role.COORDINATOR, id=name)


@in_rig(cluster, 2)
async def test_an_address_served_by_another_replica_is_no_peer(c: Cluster) -> None:
    liar = Replica(instance="instance-r3", address="r2")  # type: ignore[arg-type]  # a NewType
    c.put(KEYS.replica("r3"), encode(liar))
    await asyncio.sleep(10)
    assert set(c["r1"].service.peers.ready()) == {c["r2"].context.instance}
    c.delete(KEYS.replica("r3"))
    await asyncio.sleep(1)


@in_world("r1", "r2", members=2)
async def test_rank_progress_reaches_all_replicas_within_a_second(c: Cluster, members: list[Member]) -> None:
    members[0].send(
        progress={
            "generation": 1,
            "ranks": [{"rank": 0, "step": 7, "phase": "train"}, {"rank": 1, "step": 99}],
        }
    )
    await asyncio.sleep(1.5)
    c["r3"].kill()
    await c.start("r3")
    await asyncio.sleep(1.5)
    for name in ("r1", "r2", "r3"):
        answer = await c[name].service.calls.answer("list_members", ListMembersRequest(job="job"), None)
        reported = {m.worker_id: [(r.rank, r.step, r.phase) for r in m.ranks] for m in answer.members}
        assert reported == {members[0].worker: [(0, 7, "train")], members[1].worker: []}
        ages = [r.age_ms for m in answer.members for r in m.ranks]
        assert 2000 < ages[0] < 8000
