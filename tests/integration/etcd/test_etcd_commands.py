"""`strata etcd` on a real etcd: it shows faults, and repairs them without loss of quorum."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import grpc
import pytest

from strata.core.kv.store import NoSpace
from strata.core.kv.txn import Put, Range, Txn
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.devcluster.etcd_member import EtcdMember, MemberPlan
from strata.errors import Unavailable
from strata.etcd import EtcdStore
from strata.etcdapi.maintenance_pb2 import AlarmRequest, AlarmType
from strata.etcdapi.maintenance_pb2_grpc import MaintenanceStub
from tests.certificates import etcd_identity
from tests.cluster_fixtures import Nodes
from tests.etcd_fixtures import StartEtcd, hashes_of_members
from tests.processes import LIMIT_S, Record, Talker

QUOTA_BYTES = 8 << 20
PASSWORD = "correct horse battery"
INTERRUPTED = 130
REFUSED = 4


class StartAnew(Protocol):
    """The `start_anew` fixture: starts a member as `replace-member` printed, and stops it after the test."""

    def __call__(self, cluster: EtcdCluster, lost: EtcdMember, settings: Mapping[str, str]) -> EtcdMember: ...


@pytest.fixture
def start_anew() -> Iterator[StartAnew]:
    running: list[EtcdMember] = []

    def start(cluster: EtcdCluster, lost: EtcdMember, settings: Mapping[str, str]) -> EtcdMember:
        if lost.running:
            lost.kill()
        shutil.rmtree(lost.data)
        ports = {
            "client_port": urlsplit(lost.endpoint).port,
            "peer_port": urlsplit(settings["ETCD_INITIAL_ADVERTISE_PEER_URLS"]).port,
        }
        flags = (
            f"--initial-cluster={settings['ETCD_INITIAL_CLUSTER']}",
            f"--initial-cluster-state={settings['ETCD_INITIAL_CLUSTER_STATE']}",
            "--unsafe-no-fsync",
        )
        plan = MemberPlan(name=settings["ETCD_NAME"], **ports)  # type: ignore[arg-type]  # both URLs have a port
        member = EtcdMember(plan, cluster.folder, cluster.binary, None, flags)
        member.start()
        running.append(member)
        return member

    yield start
    for member in running:
        member.kill()


def names(cluster: EtcdCluster) -> str:
    return ",".join(endpoint.removeprefix("http://") for endpoint in cluster.endpoints)


def strata(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its exit code is."""
    return subprocess.run(
        [sys.executable, "-m", "strata", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=4 * LIMIT_S,
    )


def etcd(cluster: EtcdCluster, *words: str) -> subprocess.CompletedProcess[str]:
    return strata("etcd", *words, "--etcd", names(cluster))


def status_until(cluster: EtcdCluster, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the output of `status --json` once it is as wanted: on a busy machine etcd may hold elections."""
    document: dict[str, Any] = {}
    for _ in range(30):
        document = json.loads(etcd(cluster, "status", "--json").stdout)
        if wanted(document):
            return document
    pytest.fail(f"the status is still {document}")


def member_named(cluster: EtcdCluster, name: str) -> EtcdMember:
    return next(member for member in cluster.members if member.name == name)


async def write_history(store: EtcdStore, count: int = 30) -> int:
    """Write one key many times, so that compaction frees the space; return the newest revision."""
    revision = 0
    for _ in range(count):
        written = await store.execute(Txn(success=(Put(key="/history", value=bytes(100_000)),)))
        revision = written.revision
    return revision


def settings_of(record: Record) -> dict[str, str]:
    """Return etcd's settings for the new member, as the command printed them."""
    record.wait_line("is not started yet at ")
    lines = [str(event.get("text", "")) for event in record.events]
    return dict(found.groups() for line in lines if (found := re.match(r"  (ETCD_\w+)=(\S+)$", line)))  # type: ignore[misc]  # two groups


def replacing(nodes: Nodes, cluster: EtcdCluster, name: str) -> Talker:
    return nodes.strata("etcd", "replace-member", name, "--etcd", names(cluster))


# -- status -------------------------------------------------------------------------------------


def test_status_names_a_silent_member_and_the_command_that_replaces_it(etcd_cluster: EtcdCluster) -> None:
    well = status_until(etcd_cluster, lambda found: found["healthy"])
    assert (well["voters"], well["healthy_voters"], well["quorum"]) == (3, 3, 2)
    assert sorted(member["role"] for member in well["members"]) == ["follower", "follower", "leader"]

    etcd_cluster.followers()[0].kill()
    sick = status_until(etcd_cluster, lambda found: found["healthy_voters"] == 2)
    assert not sick["healthy"]
    (silent,) = (member for member in sick["members"] if member["role"] == "silent")
    shown = etcd(etcd_cluster, "status")
    assert shown.returncode == 1
    assert shown.stderr == ""
    assert "silent: connection refused" in shown.stdout
    assert "2 of 3 voters healthy; 2 are needed: one more loss stops all writes" in shown.stdout
    assert f"strata etcd replace-member {silent['name']} --etcd {names(etcd_cluster)}" in shown.stdout


def test_without_a_quorum_status_reports_it_and_no_member_is_replaced(etcd_cluster: EtcdCluster) -> None:
    for member in etcd_cluster.members[1:]:
        member.kill()
    status_until(etcd_cluster, lambda found: found["healthy_voters"] == 0)
    shown = etcd(etcd_cluster, "status")
    assert shown.returncode == 1
    assert "etcd has no leader: nothing can be written" in shown.stdout
    refused = etcd(etcd_cluster, "replace-member", etcd_cluster.members[1].name)
    assert refused.returncode == REFUSED
    assert "0 of 3 voters would be healthy, and 2 are needed" in refused.stderr


def test_a_member_without_an_endpoint_is_unknown(etcd_cluster: EtcdCluster) -> None:
    given, _, left_out = names(etcd_cluster).rpartition(",")
    shown = strata("etcd", "status", "--etcd", given)
    assert shown.returncode == 1
    assert f"is unknown: add its endpoint {left_out} to --etcd" in shown.stdout
    refused = strata("etcd", "defrag", "--etcd", given)
    assert refused.returncode == REFUSED
    assert f"add its endpoint {left_out} to --etcd" in refused.stderr


def test_certificates_and_a_password_come_from_the_file_and_are_not_shown(
    start_etcd: StartEtcd, tmp_path: Path
) -> None:
    identity = etcd_identity(tmp_path)
    cluster = start_etcd(1, tls=identity)
    tls = (f"--cacert={identity.ca}", f"--cert={identity.cert}", f"--key={identity.key}")
    for words in (
        ("user", "add", f"root:{PASSWORD}"),
        ("user", "grant-role", "root", "root"),
        ("auth", "enable"),
    ):
        ctl = (str(cluster.binary.tool("etcdctl")), f"--endpoints={cluster.endpoints[0]}", *tls)
        subprocess.run((*ctl, *words), check=True, capture_output=True)
    password = tmp_path / "password"
    password.touch(mode=0o600)
    password.write_text(PASSWORD)
    config = tmp_path / "strata.toml"
    config.write_text(
        f"""[etcd]
endpoints = ["{cluster.endpoints[0]}"]
ca_file = "{identity.ca}"
cert_file = "{identity.cert}"
key_file = "{identity.key}"
username = "root"
password_file = "{password}"
quota_bytes = 20000
"""
    )
    outputs = []
    for words in (
        ("etcd", "status"),
        ("etcd", "defrag", "--compact", "--stall-all"),
        ("etcd", "alarm", "--disarm"),
    ):
        ran = strata(*words, "--config", str(config))
        assert ran.returncode == 0, ran.stderr
        outputs.append(ran.stdout + ran.stderr)
    assert "1 of 1 voters healthy" in outputs[0]
    doctor = strata("doctor", "--config", str(config))
    assert f"etcd {cluster.endpoints[0].removeprefix('https://')}" in doctor.stdout
    assert PASSWORD not in "".join(outputs) + doctor.stdout + doctor.stderr


# -- defragmentation ----------------------------------------------------------------------------


async def test_writes_continue_while_three_members_are_defragmented(etcd_cluster: EtcdCluster) -> None:
    async with await EtcdStore.connect(etcd_cluster.endpoints) as store:
        await write_history(store)
        before = etcd_cluster.leader().name
        ended = asyncio.Event()

        async def write() -> int:
            number = 0
            while not ended.is_set():
                try:
                    await store.execute(Txn(success=(Put(key="/number", value=str(number + 1).encode()),)))
                except Unavailable:
                    continue  # this replica's etcd member stalled for longer than the request's deadline
                number += 1
            return number

        writing = asyncio.create_task(write())
        try:
            ran = await asyncio.to_thread(etcd, etcd_cluster, "defrag", "--compact", "--json")
        finally:
            ended.set()
        assert ran.returncode == 0, ran.stderr
        written = await writing
        assert written > 3
        found = await store.read(Range(key="/number"))
        assert int(found.kvs[0].value) >= written
        document = json.loads(ran.stdout)
        assert len(document["freed"]) == 3
        # on a busy machine etcd may have held an election meanwhile
        assert document["freed"][-1]["member"] in {before, etcd_cluster.leader().name}
        for freed in document["freed"]:
            assert freed["after_bytes"] < freed["before_bytes"] / 2


def test_defragmentation_that_would_cost_the_quorum_is_refused(etcd_cluster: EtcdCluster) -> None:
    lost, left = etcd_cluster.followers()
    lost.kill()
    status_until(etcd_cluster, lambda found: found["healthy_voters"] == 2)
    for words in ((), ("--member", left.name)):
        refused = etcd(etcd_cluster, "defrag", *words)
        assert refused.returncode == REFUSED
        assert "1 of 3 voters would be healthy, and 2 are needed" in refused.stderr
        assert f"{lost.name} does not answer" in refused.stderr
    document = json.loads(etcd(etcd_cluster, "defrag", "--compact", "--json").stdout)
    assert (document["compacted_revision"], document["freed"]) == (None, [])


def test_a_cluster_of_one_is_defragmented_only_if_all_may_stall(start_etcd: StartEtcd) -> None:
    cluster = start_etcd(1)
    refused = etcd(cluster, "defrag")
    assert refused.returncode == REFUSED
    assert "--stall-all" in refused.stderr
    ran = etcd(cluster, "defrag", "--stall-all")
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^etcd-1 .* → ", ran.stdout)


# -- alarms -------------------------------------------------------------------------------------


async def test_the_commands_that_doctor_prints_repair_a_nospace_alarm(
    start_etcd: StartEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_ETCD_QUOTA_BYTES", str(QUOTA_BYTES))
    cluster = await asyncio.to_thread(
        lambda: start_etcd(3, extra_args=(f"--quota-backend-bytes={QUOTA_BYTES}",))
    )
    async with await EtcdStore.connect(cluster.endpoints) as store:
        with pytest.raises(NoSpace):
            await write_history(store, count=200)

        shown = await asyncio.to_thread(etcd, cluster, "status")
        assert shown.returncode == 1
        assert "3 of 3 voters healthy" in shown.stdout
        assert "alarm NOSPACE of etcd-" in shown.stdout
        early = await asyncio.to_thread(etcd, cluster, "alarm", "--disarm")
        assert early.returncode == REFUSED
        assert "databases still take 90 % of the quota or more" in early.stderr
        assert f"strata etcd defrag --compact --etcd {names(cluster)}" in early.stderr

        output = await asyncio.to_thread(strata, "doctor", "--etcd", names(cluster))
        commands = re.findall(r"^\s*strata (etcd .*)$", output.stdout, re.MULTILINE)
        assert len(commands) == 2
        for command in commands:
            ran = await asyncio.to_thread(strata, *shlex.split(command))
            assert ran.returncode == 0, (command, ran.stderr)
        await store.execute(Txn(success=(Put(key="/again", value=b""),)))
        assert (await asyncio.to_thread(etcd, cluster, "alarm")).stdout == "no alarm is on\n"


# -- replacing a member -------------------------------------------------------------------------


async def test_a_member_that_lost_its_data_is_replaced(
    etcd_cluster: EtcdCluster, nodes: Nodes, start_anew: StartAnew
) -> None:
    async with await EtcdStore.connect(etcd_cluster.endpoints) as store:
        await write_history(store, count=5)
    lost = (await asyncio.to_thread(etcd_cluster.followers))[0]
    await asyncio.to_thread(lost.kill)

    command = await asyncio.to_thread(replacing, nodes, etcd_cluster, lost.name)
    settings = await asyncio.to_thread(settings_of, nodes.record)
    assert settings["ETCD_NAME"] == lost.name
    assert settings["ETCD_INITIAL_CLUSTER_STATE"] == "existing"
    await asyncio.to_thread(start_anew, etcd_cluster, lost, settings)
    assert await asyncio.to_thread(command.join) == 0
    nodes.record.wait_line(f"{lost.name} is a voter")

    document = await asyncio.to_thread(status_until, etcd_cluster, lambda found: found["healthy"])
    assert document["healthy_voters"] == document["voters"] == 3
    async with await EtcdStore.connect(etcd_cluster.endpoints) as store:
        revision = (await store.execute(Txn(success=(Put(key="/after", value=b""),)))).revision
        async with asyncio.timeout(LIMIT_S):
            assert len(await hashes_of_members(store, revision - 1)) == 1
    again = await asyncio.to_thread(etcd, etcd_cluster, "replace-member", lost.name)
    assert again.returncode == REFUSED
    assert "is a healthy voter: nothing has to be replaced" in again.stderr


def test_replacing_a_member_resumes_after_ctrl_c(
    etcd_cluster: EtcdCluster, nodes: Nodes, start_anew: StartAnew
) -> None:
    lost = etcd_cluster.followers()[0]
    lost.kill()
    status_until(etcd_cluster, lambda found: found["healthy_voters"] == 2)
    command = replacing(nodes, etcd_cluster, lost.name)
    settings = settings_of(nodes.record)
    command.signal(signal.SIGINT)
    assert command.join() == INTERRUPTED
    line = nodes.record.wait_line("this goes on with it: ")

    words = ("replace-member", lost.name, "--timeout-s", "0", "--json")
    unnamed = etcd(etcd_cluster, *words)
    assert unnamed.returncode != 0
    peer_url = settings["ETCD_INITIAL_ADVERTISE_PEER_URLS"]
    assert f"--peer-url {peer_url}" in unnamed.stderr
    limited = etcd(etcd_cluster, *words, "--peer-url", peer_url)
    assert limited.returncode == 3
    document = json.loads(limited.stdout)
    assert document["resumed"]
    assert document["environment"] == settings

    start_anew(etcd_cluster, lost, settings)
    again = strata(*shlex.split(line.partition("strata ")[2]))
    assert again.returncode == 0, again.stderr
    assert "3 of 3 voters healthy" in again.stdout
    assert len(status_until(etcd_cluster, lambda found: found["healthy"])["members"]) == 3


def test_a_corrupt_member_is_replaced_and_its_alarm_disarmed(
    etcd_cluster: EtcdCluster, nodes: Nodes, start_anew: StartAnew
) -> None:
    lost = etcd_cluster.followers()[0]
    with grpc.insecure_channel(etcd_cluster.leader().endpoint.removeprefix("http://")) as channel:
        MaintenanceStub(channel).Alarm(
            AlarmRequest(
                action=AlarmRequest.ACTIVATE, alarm=AlarmType.CORRUPT, memberID=lost.status().member_id
            ),
            timeout=LIMIT_S,
        )
    replace = f"strata etcd replace-member {lost.name} --etcd {names(etcd_cluster)}"
    early = etcd(etcd_cluster, "alarm", "--disarm")
    assert early.returncode == REFUSED
    assert replace in early.stderr
    output = strata("doctor", "--etcd", names(etcd_cluster))
    first, second = re.findall(r"^\s*(strata etcd .*)$", output.stdout, re.MULTILINE)
    assert first == replace

    command = nodes.strata(*shlex.split(first)[1:])
    start_anew(etcd_cluster, lost, settings_of(nodes.record))
    assert command.join() == 0
    disarmed = strata(*shlex.split(second)[1:])
    assert disarmed.returncode == 0, disarmed.stderr
    assert status_until(etcd_cluster, lambda found: found["healthy"])["alarms"] == []
