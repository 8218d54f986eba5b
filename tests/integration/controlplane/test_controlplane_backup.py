"""Backups of a real etcd by the command line: during writes, with a lost member, and interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import ClusterUid, encode
from strata.core.kv.txn import Put, Txn, absent
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.devcluster.local_cluster import LocalCluster
from strata.devcluster.ports import free_port
from strata.etcd import EtcdStore, MemberStatus
from tests.cluster_fixtures import run_strata
from tests.etcd_fixtures import StartEtcd
from tests.integration.gate import gated
from tests.polling import until
from tests.processes import Record, Talker

LIMIT_S = 60.0
KEYS = ClusterKeys("default")
BEGIN = Txn(
    compares=(absent(KEYS.uid),), success=(Put(key=KEYS.uid, value=encode(ClusterUid(uid="0b6f4a9e"))),)
)
"""The first transaction of a new cluster's first replica."""


def hosts(etcd: EtcdCluster) -> str:
    return ",".join(endpoint.removeprefix("http://") for endpoint in etcd.endpoints)


def back_up(to: Path | str, etcd: str, *more: str) -> tuple[int, str]:
    return run_strata("controlplane", "backup", "--to", str(to), "--etcd", etcd, *more)


def made(to: Path | str, etcd: str, *more: str) -> dict[str, Any]:
    code, output = back_up(to, etcd, *more, "--json")
    assert code == 0, output
    answer: dict[str, Any] = json.loads(output)
    return answer


def listed(place: Path) -> list[dict[str, Any]]:
    code, output = run_strata("controlplane", "backups", str(place), "--json")
    assert code == 0, output
    answer: list[dict[str, Any]] = json.loads(output)
    return answer


def doctor(etcd: str) -> dict[str, Any]:
    """Return doctor's finding about backups; no coordinator runs."""
    nobody = f"127.0.0.1:{free_port()}"
    _code, output = run_strata("doctor", "--endpoints", nobody, "--etcd", etcd, "--timeout-s", "1", "--json")
    # a line from gRPC may follow: doctor runs two event loops, and one etcd member is dead
    findings, _end = json.JSONDecoder().raw_decode(output[output.index("[\n") :])
    finding: dict[str, Any] = next(each for each in findings if each["what"] == "backup")
    return finding


def snapshot_status(etcd_bin: Path, database: Path) -> dict[str, Any]:
    """Return the status that etcdutl prints for a snapshot."""
    words = [str(etcd_bin / "etcdutl"), "snapshot", "status", str(database), "-w", "json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def file_in(folder: Path) -> None:
    """Return once the folder exists and has a file."""
    until(lambda: folder.is_dir() and any(folder.iterdir()), limit_s=LIMIT_S)


@contextlib.asynccontextmanager
async def writing(etcd: EtcdCluster) -> AsyncIterator[list[int]]:
    """Write values of 1 KiB while the body runs; yield the list of confirmed revisions."""
    revisions: list[int] = []
    begun = asyncio.Event()

    async def write(store: EtcdStore) -> None:
        while True:
            put = Put(key=f"/strata/v1/default/jobs/j{len(revisions) % 500}/spec", value=b"x" * 1024)
            with contextlib.suppress(Exception):  # the test kills a member during the writes
                revisions.append((await store.execute(Txn(success=(put,)))).revision)
                begun.set()

    async with await EtcdStore.connect(etcd.endpoints) as store:
        await store.execute(BEGIN)
        task = asyncio.create_task(write(store))
        await begun.wait()
        try:
            yield revisions
        finally:
            task.cancel()
            await asyncio.wait((task,))


async def begun(etcd: EtcdCluster) -> None:
    async with await EtcdStore.connect(etcd.endpoints) as store:
        await store.execute(BEGIN)


@pytest.mark.journey
async def test_a_backup_succeeds_under_writes_with_one_of_three_members_killed(
    etcd_cluster: EtcdCluster, etcd_bin: Path, tmp_path: Path
) -> None:
    place, etcd = tmp_path / "backups", hosts(etcd_cluster)
    async with asyncio.timeout(LIMIT_S), writing(etcd_cluster) as revisions:
        assert (await asyncio.to_thread(doctor, etcd))["says"] == "no backup of the control plane"
        victim = (await asyncio.to_thread(etcd_cluster.followers))[0]
        victim.kill()
        confirmed = revisions[-1]
        backup = await asyncio.to_thread(made, place, etcd)
    assert backup["revision"] >= confirmed
    assert backup["member"] not in {victim.name, etcd_cluster.leader().name}
    assert backup["warnings"] == []

    status = snapshot_status(etcd_bin, place / f"{backup['name']}.db")
    assert status["revision"] >= backup["revision"], "etcd's own tool reads it, and agrees"
    assert status["totalKey"] > 0

    code, output = run_strata("controlplane", "verify", str(place))
    assert code == 0, output
    assert f"{backup['name']} is whole" in output
    finding = doctor(etcd)
    assert finding["level"] == "OK", finding
    assert place.as_uri() in finding["says"]


async def test_a_flipped_bit_is_found(etcd_cluster: EtcdCluster, tmp_path: Path) -> None:
    await begun(etcd_cluster)
    place = tmp_path / "backups"
    backup = await asyncio.to_thread(made, place, hosts(etcd_cluster))
    database = place / f"{backup['name']}.db"
    data = bytearray(database.read_bytes())
    data[len(data) // 3] ^= 16
    database.write_bytes(data)
    code, output = await asyncio.to_thread(run_strata, "controlplane", "verify", str(place))
    assert code == 1
    assert "has changed since the backup" in output
    assert "Traceback" not in output
    code, output = await asyncio.to_thread(run_strata, "controlplane", "verify", str(place), "--json")
    assert code == 1
    assert json.loads(output)["whole"] is False


async def test_the_newest_two_backups_stay_even_if_made_at_the_same_time(
    etcd_cluster: EtcdCluster, tmp_path: Path
) -> None:
    etcd, place = hosts(etcd_cluster), tmp_path / "backups"
    place.mkdir()
    await begun(etcd_cluster)
    (place / "notes.txt").write_text("not ours")
    first = await asyncio.to_thread(made, place, etcd, "--keep", "2")
    both = await asyncio.gather(*(asyncio.to_thread(made, place, etcd, "--keep", "2") for _ in range(2)))
    assert {each["name"] for each in listed(place)} == {each["name"] for each in both}
    assert first["name"] not in {each["name"] for each in both}
    assert len(list(place.iterdir())) == 5
    for each in both:
        code, output = await asyncio.to_thread(
            run_strata, "controlplane", "verify", str(place), "--name", each["name"]
        )
        assert code == 0, output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_in_the_middle_leaves_nothing(
    start_etcd: StartEtcd, tmp_path: Path, number: signal.Signals
) -> None:
    etcd = start_etcd(1)
    async with asyncio.timeout(LIMIT_S), await EtcdStore.connect(etcd.endpoints) as store:
        await store.execute(BEGIN)
        for at in range(8):
            await store.execute(Txn(success=(Put(key=f"/fill/{at}", value=b"x" * (512 << 10)),)))
        async with gated(etcd.endpoints[0]) as gate:
            gate.shut_after(1 << 20)
            record = Record()
            words = ("controlplane", "backup", "--to", str(tmp_path / "b"), "--etcd", gate.address)
            talker = Talker([sys.executable, "-m", "strata", *words], name="backup", record=record)
            await gate.has_shut.wait()
            temporary = tmp_path / "b"
            await asyncio.to_thread(file_in, temporary)
            assert [path.suffix for path in temporary.iterdir()] == [".tmp"]
            talker.signal(number)
            code = await asyncio.to_thread(talker.join)
        assert code == 130, record.events
        assert list(temporary.iterdir()) == []
        assert not [e for e in record.events if "Traceback" in str(e)]
        assert (await asyncio.to_thread(doctor, hosts(etcd)))["level"] == "WARN"


async def test_without_a_healthy_member_a_backup_fails_and_names_each_members_fault(
    etcd_cluster: EtcdCluster, tmp_path: Path
) -> None:
    await begun(etcd_cluster)
    dead = etcd_cluster.members[:2]
    for member in dead:
        member.kill()
    alive = etcd_cluster.members[2].endpoint.removeprefix("http://")
    async with asyncio.timeout(LIMIT_S), await EtcdStore.connect([etcd_cluster.members[2].endpoint]) as store:
        while True:
            status = (await store.cluster.statuses())[alive]
            if isinstance(status, MemberStatus) and not status.leader_id:
                break
            await asyncio.sleep(0.05)
    place = tmp_path / "backups"
    code, output = await asyncio.to_thread(back_up, place, hosts(etcd_cluster))
    assert code == 3, output
    assert "no etcd member can give a snapshot" in output
    assert f"{alive}: it knows no leader" in output
    for member in dead:
        assert f"{member.endpoint.removeprefix('http://')}: it does not answer" in output
    assert list(place.iterdir()) == []


def test_coordinators_keep_serving_during_a_backup(cluster: LocalCluster, tmp_path: Path) -> None:
    backup = made(tmp_path, hosts(cluster.etcd))
    assert backup["reason"].endswith("leads, and no other member was named")
    code, output = run_strata("status", "--endpoints", cluster.endpoints, "--json")
    assert code == 0, output
    assert all(replica["ready"] for replica in json.loads(output)["replicas"])
    code, output = run_strata(
        "controlplane", "backup", "--to", str(tmp_path), "--etcd", hosts(cluster.etcd), "--cluster", "typo"
    )
    assert code == 4
    assert "hint: it holds default" in output


@pytest.fixture(scope="module")
def aws() -> Iterator[dict[str, str]]:
    """The environment for an S3 server in this process that has the bucket `backups`."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    names = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="strata-test",
        aws_secret_access_key="not-a-secret",  # not a real secret
    )
    client.create_bucket(Bucket="backups")
    yield {
        **names,
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "strata-test",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    server.stop()


def test_a_backup_is_made_and_verified_in_s3(cluster: LocalCluster, aws: dict[str, str]) -> None:
    place = "s3://backups/control plane".replace(" ", "%20")

    def strata(*words: str) -> tuple[int, str]:
        return run_strata("controlplane", *words, env=aws)

    etcd = ("--etcd", hosts(cluster.etcd))
    code, output = strata("backup", "--to", place, *etcd)
    assert code == 0, output
    assert f" is in {place}" in output
    code, output = strata("verify", place)
    assert code == 0, output
    code, output = strata("backups", place)
    assert code == 0, output
    assert place in output

    code, output = strata("backup", "--to", "s3://nobody-made-it/x", *etcd)
    assert code == 1
    assert output.splitlines() == [
        "error: cannot list s3://nobody-made-it/x/: the server answered NoSuchBucket (404)",
        "hint: create the bucket, or look for a slip in its name, the region and the endpoint",
    ]
