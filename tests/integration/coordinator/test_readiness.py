"""`/readyz` while etcd takes no writes: its quota is used up, or it has no leader.

Members keep their sessions and still read, no member is declared dead, `/healthz` stays 200, and
`strata doctor` prints the remedy.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.store import NoSpace
from strata.core.kv.txn import KeyValue, Put, Range, Txn
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.etcd import EtcdStore
from tests.cluster_fixtures import run_strata
from tests.etcd_fixtures import StartEtcd
from tests.integration.replicas import LIMIT_S, Replicas, started

DETECT_S = 1.0
QUOTA_BYTES = 8 << 20
KEYS = ClusterKeys("readiness")
JOB = KEYS.job("job")


async def fetch(address: str, path: str) -> tuple[int, str]:
    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=LIMIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(get)


async def pages(c: Replicas) -> list[str]:
    """Return the HTTP address of every replica."""
    status = await c["r1"].status()
    assert status is not None
    return [replica.http_address for replica in status.replicas]


async def eventually(probes: list[str], wanted: Callable[[int, str], bool], *, limit_s: float) -> None:
    """Return once `wanted` holds for each replica's answer to `/readyz`."""
    seen: list[tuple[int, str]] = []
    try:
        async with asyncio.timeout(limit_s):
            for address in probes:
                while not wanted(*(await fetch(address, "/readyz"))):
                    seen = [await fetch(each, "/readyz") for each in probes]
                    await asyncio.sleep(0.2)  # polls another process
    except TimeoutError:
        pytest.fail(f"/readyz still says {seen}")


def ready(code: int, _body: str) -> bool:
    return code == 200


async def worker(store: EtcdStore, name: str) -> KeyValue | None:
    found = await store.read(Range(key=JOB.worker(name)))
    return found.kvs[0] if found.kvs else None


async def fill(store: EtcdStore) -> None:
    """Write revisions of one key until etcd raises its alarm; compaction frees their space."""
    for _ in range(100):
        try:
            await store.execute(Txn(success=(Put(key="/filler", value=bytes(1 << 20)),)))
        except NoSpace:
            return
    pytest.fail("etcd took everything")


def etcd_names(etcd: EtcdCluster) -> str:
    return ",".join(endpoint.removeprefix("http://") for endpoint in etcd.endpoints)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_full_etcd_is_not_ready_until_the_commands_of_doctor_were_run(
    start_etcd: StartEtcd, tmp_path: Path
) -> None:
    etcd = await asyncio.to_thread(
        lambda: start_etcd(3, extra_args=(f"--quota-backend-bytes={QUOTA_BYTES}",))
    )
    async with (
        started(etcd, "readiness", tmp_path, detect_s=DETECT_S) as c,
        await EtcdStore.connect(etcd.endpoints) as store,
    ):
        members = await c.world("r1", "r2")
        probes = await pages(c)
        await eventually(probes, ready, limit_s=LIMIT_S)
        await fill(store)
        await eventually(
            probes,
            lambda code, body: code == 503 and "quota is used up" in body and "strata doctor" in body,
            limit_s=15.0,
        )

        # sessions and reads go on, the process is alive, and every status view shows why etcd takes no writes
        endpoints = ",".join(c[name].address for name in c.names)
        assert [(await fetch(each, "/healthz"))[0] for each in probes] == [200, 200, 200]
        assert "quota is used up" in (await fetch(probes[0], "/status"))[1]
        assert "strata_writable 0.0" in (await fetch(probes[0], "/metrics"))[1]
        _code, shown = await asyncio.to_thread(run_strata, "status", "--endpoints", endpoints)
        assert "nothing can be written: etcd's quota is used up" in shown
        ticks = [len(member.all("tick")) for member in members]
        with CoordinatorClient.connect(endpoints) as client:
            jobs = await asyncio.to_thread(client.jobs)
        assert [job.name for job in jobs] == ["job"]

        # a member that loses its connection now must not be declared dead, because it could not register again
        members[0].drop()
        lost = members[0].worker
        await asyncio.sleep(8 * DETECT_S)
        assert await worker(store, lost) is not None
        assert not members[1].over.is_set()
        assert len(members[1].all("tick")) > ticks[1] + 4
        assert all(tick.ready for tick in members[1].all("tick")), "it is better served nowhere"

        # the test runs the commands exactly as `doctor` prints them
        code, output = await asyncio.to_thread(
            run_strata, "doctor", "--etcd", etcd_names(etcd), "--endpoints", endpoints
        )
        commands = re.findall(r"^\s*strata (etcd .*)$", output, re.MULTILINE)
        assert code != 0
        assert [each.partition(" --etcd ")[0] for each in commands] == [
            "etcd defrag --compact", "etcd alarm --disarm",
        ]  # fmt: skip
        await members[0].connect("r1")  # it reconnects while nothing can be written
        for command in commands:
            ran, printed = await asyncio.to_thread(run_strata, *shlex.split(command))
            assert ran == 0, (command, printed)
        await eventually(probes, ready, limit_s=15.0)
        assert "strata_writable 1.0" in (await fetch(probes[0], "/metrics"))[1]
        assert await worker(store, lost) is not None
        assert members[0].incarnation == (await worker(store, lost)).create_revision  # type: ignore[union-attr]  # asserted above
        assert members[0].all("world")[-1].world.generation == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_etcd_without_a_leader_is_not_ready(etcd_cluster: EtcdCluster, tmp_path: Path) -> None:
    async with (
        started(etcd_cluster, "readiness", tmp_path, detect_s=DETECT_S) as c,
        await EtcdStore.connect(etcd_cluster.endpoints) as store,
    ):
        members = await c.world("r1", "r2")
        probes = await pages(c)
        await eventually(probes, ready, limit_s=LIMIT_S)
        before = [(await worker(store, member.worker)) for member in members]
        stopped = etcd_cluster.members[1:]
        for member in stopped:
            await asyncio.to_thread(member.kill)
        await eventually(
            probes,
            lambda code, body: code == 503 and "it has no leader: 1 of 3 members answer" in body,
            limit_s=20.0,
        )
        for _ in range(20):  # the answer stays 503 and must not flap with the events of a watch
            assert {(await fetch(each, "/readyz"))[0] for each in probes} == {503}
            await asyncio.sleep(0.2)  # polls another process
        assert [(await fetch(each, "/healthz"))[0] for each in probes] == [200, 200, 200]
        code, output = await asyncio.to_thread(
            run_strata, "doctor", "--etcd", etcd_names(etcd_cluster), "--timeout-s", "1"
        )
        assert code != 0
        alive = etcd_cluster.members[0].endpoint.removeprefix("http://")
        assert f"1 of 3 members answer ({alive})" in output
        # a replica that stalls under load, or sees etcd's loss later than a peer, may move members to a peer
        left = [member for member in members if member.over.is_set()]
        assert all(member.error is None and member.all("moved") for member in left), [m.error for m in left]

        for etcd_member in stopped:
            etcd_member.start()
        await asyncio.to_thread(etcd_cluster.wait_healthy)
        for departed in left:
            await departed.connect("r3")
        await eventually(probes, ready, limit_s=20.0)
        after = [(await worker(store, member.worker)) for member in members]
        assert [kv and kv.create_revision for kv in after] == [kv and kv.create_revision for kv in before]
