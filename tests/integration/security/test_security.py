"""Certificates and tokens over real connections: admitted callers, and the errors for rejected ones."""

from __future__ import annotations

import datetime as dt
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from strata import CoordinatorClient
from strata.config import Credentials
from strata.core.access.authority import Role
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import ConfigError, PermissionDenied, StrataError, Unauthenticated
from strata.security.certificates import Authority
from strata.v1.admin_pb2 import GetStatusRequest
from strata.v1.checkpoints_pb2 import DeleteCheckpointRequest
from strata.v1.members_pb2 import HeartbeatRequest, RegisterRequest, Registration
from strata.v1.members_pb2_grpc import MembersStub
from strata.v1.peers_pb2 import PeerHello, PeerUp
from strata.v1.peers_pb2_grpc import PeersStub
from strata.v1.watch_pb2 import WatchRequest
from strata.v1.watch_pb2_grpc import WatchStub
from strata.wire.status import translated
from tests.certificates import signed_by
from tests.cluster_fixtures import Nodes, run_strata
from tests.secured_fixtures import LIMIT_S, NOW, Secured, flags, issued, sync_channel

DAY = dt.timedelta(days=1)


def refused(client: CoordinatorClient) -> StrataError:
    """Return the error of a client that may not even read."""
    with client, pytest.raises(StrataError) as caught:
        client.status()
    assert caught.value.hint
    assert "Socket closed" not in caught.value.message
    return caught.value


# -- certificates


@pytest.mark.journey
def test_replicas_authenticate_each_other_by_certificate(secured: Secured) -> None:
    with secured.client(secured.who(Role.VIEWER, "v")) as client:
        answer = client.call_until(
            GetStatusRequest(), lambda status: sum(r.ready for r in status.replicas) == 3
        )
    assert sorted(r.ready for r in answer.replicas) == [True] * 3
    assert all(member.healthy for member in answer.etcd)


def test_a_member_may_act_only_under_its_own_worker_id(secured: Secured, job: str) -> None:
    with secured.client(secured.who(Role.MEMBER, "w1"), job=job) as client:
        assert client.register(worker_id="w1").incarnation
        assert client.heartbeat(worker_id="w1") is not None
        with pytest.raises(PermissionDenied, match="may not speak for worker 'w2'") as caught:
            client.register(worker_id="w2")
        assert "worker id is w1" in caught.value.hint
        with pytest.raises(PermissionDenied):
            client.call(HeartbeatRequest(job=job, worker_id="w2"))
        client.leave(worker_id="w1")


def test_a_bare_heartbeat_registers_only_workers_its_caller_may_act_for(secured: Secured, job: str) -> None:
    address = secured.local.coordinators[0].address

    def beat(who: Credentials, *, worker_id: str, job: str = "") -> None:
        with sync_channel(address, who) as channel, translated(address):
            stub: Any = MembersStub(channel)
            stub.Heartbeat(HeartbeatRequest(job=job, worker_id=worker_id), timeout=LIMIT_S)

    mine = secured.who(Role.MEMBER, "w1", jobs=[job])
    beat(mine, job=job, worker_id="w1")
    with secured.client(mine, job=job) as client:
        assert [member.worker_id for member in client.members()] == ["w1"]
    with pytest.raises(PermissionDenied, match="may not act in job default"):
        beat(mine, worker_id="w1")
    with pytest.raises(PermissionDenied, match="may not speak for worker 'w2'"):
        beat(mine, job=job, worker_id="w2")
    with pytest.raises(PermissionDenied):
        beat(secured.who(Role.VIEWER, "v"), worker_id="v")


def test_a_viewer_reads_and_changes_nothing(secured: Secured, job: str) -> None:
    with secured.client(secured.who(Role.VIEWER, "v"), job=job) as client:
        assert client.status().cluster == "default"
        with pytest.raises(PermissionDenied, match=r"viewer v may not call Checkpoints\.DeleteCheckpoint"):
            client.call(DeleteCheckpointRequest(job=job, step=1))
        with pytest.raises(PermissionDenied):
            client.call(RegisterRequest(registration=Registration(job=job, worker_id="v", boot="b", slots=1)))


def test_a_certificate_may_be_limited_to_a_job(secured: Secured, job: str) -> None:
    mine = secured.who(Role.MEMBER, "w1", jobs=[job])
    with (
        secured.client(mine, job="another") as client,
        pytest.raises(PermissionDenied, match="in job another"),
    ):
        client.register(worker_id="w1")
    with secured.client(mine, job=job) as client:
        assert client.register(worker_id="w1").incarnation
        client.leave(worker_id="w1")


def test_only_a_coordinator_may_link_as_a_peer_and_watches_are_authorized_too(secured: Secured) -> None:
    address = secured.local.coordinators[0].address
    for role, method in (
        (Role.OPERATOR, "Peers.Link"),
        (Role.MEMBER, "Peers.Link"),
        (Role.ETCD, "Watch.Watch"),
    ):
        with sync_channel(address, secured.who(role, "x")) as channel:
            stub: Any = PeersStub(channel) if method == "Peers.Link" else WatchStub(channel)
            stream = stub.Link(iter(())) if method == "Peers.Link" else stub.Watch(WatchRequest(job="j"))
            with pytest.raises(PermissionDenied, match=method), translated(address):
                next(stream)


def test_a_coordinator_certificate_is_valid_only_for_its_own_replica(secured: Secured) -> None:
    target, other = secured.local.coordinators[:2]
    with sync_channel(target.address, secured.who(Role.COORDINATOR, "x")) as channel:
        stub: Any = PeersStub(channel)
        hello = PeerUp(hello=PeerHello(replica=other.name, instance="i"))
        refused = pytest.raises(PermissionDenied, match=f"coordinator x is not replica {other.name}")
        with refused, translated(target.address):
            next(stub.Link(iter([hello]), timeout=LIMIT_S))


def test_health_and_reflection_are_open_to_any_certificate_of_the_cluster(secured: Secured) -> None:
    address = secured.local.coordinators[0].address
    with sync_channel(address, secured.who(Role.ETCD, "e")) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection: Any = reflection_pb2_grpc
        stub: Any = reflection.ServerReflectionStub(channel)
        listed = next(stub.ServerReflectionInfo(iter([request]), timeout=LIMIT_S))
        assert "strata.v1.Sessions" in {s.name for s in listed.list_services_response.service}


@pytest.mark.parametrize(
    ("case", "cls", "printed"),
    [
        ("nothing", Unauthenticated, "requires a client certificate, and we have none"),
        ("a stranger", Unauthenticated, "does not accept our certificate"),
        ("no trust", ConfigError, "not signed by our authority"),
        ("expired", ConfigError, r"our certificate .* expired on 20\d\d-\d\d-\d\d"),
        ("not yet", ConfigError, "is not valid before"),
        ("another cluster", PermissionDenied, "belongs to cluster elsewhere, this is default"),
        ("no identity", Unauthenticated, "names no identity"),
        ("a role for etcd", PermissionDenied, "etcd e may not call"),
        ("plaintext", ConfigError, "speaks TLS, and plaintext is configured"),
        ("a readable key", ConfigError, "can be read by others"),
        ("two halves", ConfigError, "are no certificate and its key"),
        ("rubbish", ConfigError, "no certificate"),
    ],
)
def test_a_rejected_caller_receives_the_reason(
    secured: Secured, tmp_path: Path, case: str, cls: type[StrataError], printed: str
) -> None:
    error = refused(secured.client(prepared(case, secured, tmp_path)))
    assert type(error) is cls, error
    assert re.search(printed, error.message), error


def prepared(case: str, secured: Secured, folder: Path) -> Credentials:
    good = secured.who(Role.VIEWER, "v")
    if case == "nothing":
        return Credentials(ca_file=good.ca_file)
    if case == "plaintext":
        return Credentials()
    if case in {"a stranger", "no trust"}:
        other = Authority.create(folder / "other", cluster="default", now=NOW)
        theirs = issued(other, folder / "theirs", Role.VIEWER, "v")
        ca = good.ca_file if case == "a stranger" else theirs.ca_file
        mine = theirs if case == "a stranger" else good
        return Credentials(ca_file=ca, cert_file=mine.cert_file, key_file=mine.key_file)
    if case == "expired":
        return secured.who(Role.VIEWER, "v", now=NOW - 10 * DAY, days=5)
    if case == "not yet":
        return secured.who(Role.VIEWER, "v", now=NOW + 10 * DAY)
    if case == "another cluster":
        twin = Authority(
            folder=folder,
            cluster="elsewhere",
            certificate=secured.authority.certificate,
            key=secured.authority.key,
        )
        return issued(twin, folder / "twin", Role.OPERATOR, "o")
    if case == "a role for etcd":
        return secured.who(Role.ETCD, "e")
    assert good.key_file is not None
    assert good.cert_file is not None
    if case == "a readable key":
        good.key_file.chmod(0o644)
    elif case == "two halves":
        good.key_file.write_bytes((secured.folder / "coordinator-1" / "key.pem").read_bytes())
    elif case == "rubbish":
        good.cert_file.write_text("hello")
    elif case == "no identity":
        cert, key = signed_by(secured.authority, folder, "nobody")
        return Credentials(ca_file=good.ca_file, cert_file=cert, key_file=key)
    return good


def test_tls_to_a_plaintext_port_is_reported(cluster: LocalCluster, secured: Secured) -> None:
    client = CoordinatorClient.connect(
        cluster.endpoints, timeout_s=LIMIT_S, credentials=secured.who(Role.VIEWER, "v")
    )
    error = refused(client)
    assert isinstance(error, ConfigError)
    assert "does not speak TLS" in error.message


# -- the command line


@pytest.mark.parametrize(
    ("role", "words", "code", "printed"),
    [
        (Role.VIEWER, ("status",), 0, "leader"),
        (Role.ETCD, ("status",), 4, "error: etcd x may not call Admin.GetStatus"),
        (None, ("status",), 4, "requires a client certificate"),
    ],
)
def test_the_command_line_reports_rejections_without_a_traceback(
    secured: Secured, role: Role | None, words: tuple[str, ...], code: int, printed: str
) -> None:
    good = secured.who(role or Role.VIEWER, "x")
    mine = good if role is not None else Credentials(ca_file=good.ca_file)
    found, output = run_strata(*words, "--endpoints", secured.local.endpoints, *flags(mine))
    assert found == code, output
    assert printed in output
    assert "Traceback" not in output


def test_a_run_under_another_members_worker_id_is_refused(secured: Secured, job: str) -> None:
    mine = secured.who(Role.MEMBER, "node-1")
    where = ("--endpoints", secured.local.endpoints, "--job", job)
    code, output = run_strata("run", *where, "--worker-id", "node-2", *flags(mine), "--", "true")
    assert code == 4, output
    assert "member node-1 may not speak for worker 'node-2'" in output
    assert "Traceback" not in output


@pytest.mark.journey
def test_a_run_works_over_tls_and_its_ranks_inherit_no_credentials(
    secured: Secured, nodes: Nodes, job: str
) -> None:
    mine = secured.who(Role.MEMBER, "node-1")
    names = {"STRATA_TLS_CA_FILE": mine.ca_file, "STRATA_TLS_CERT_FILE": mine.cert_file}
    env = {name: str(path) for name, path in {**names, "STRATA_TLS_KEY_FILE": mine.key_file}.items()}
    node = nodes.run(secured.local.endpoints, "plain", env=env)
    assert node.join(LIMIT_S) == 0
    (started,) = nodes.record.of("start")
    kept = {name for name in started["env"] if name.startswith(("STRATA_TLS", "STRATA_AUTH"))}
    assert kept == {"STRATA_TLS_CA_FILE"}  # the CA certificate is not secret


JOINING = """
import json, os, sys
import strata

def to_coordinators():
    ports = {int(endpoint.rpartition(":")[2]) for endpoint in os.environ["STRATA_ENDPOINTS"].split(",")}
    tables = [open(f"/proc/self/net/{name}").read() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    inodes = {line[9] for line in lines if int(line[2].rpartition(":")[2], 16) in ports}
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(fd) for fd in fds if os.path.lexists(fd)]
    return sum(f"socket:[{inode}]" in links for inode in inodes)

client = strata.connect(timeout_s=30)
children = [pid for task in os.listdir("/proc/self/task") for pid in open(f"/proc/self/task/{task}/children").read().split()]
words = "".join(open(f"/proc/{pid}/cmdline").read() for pid in children)
print(json.dumps({"event": "joined", "connections": to_coordinators(), "words": words}), flush=True)
client.close()
"""


def test_a_standalone_process_shows_its_certificate_through_its_agent(
    secured: Secured, nodes: Nodes, job: str
) -> None:
    mine = secured.who(Role.MEMBER, "joining")
    env = {
        "STRATA_ENDPOINTS": secured.local.endpoints,
        "STRATA_JOB": job,
        "STRATA_WORKER_ID": "joining",
        "STRATA_TLS_CA_FILE": str(mine.ca_file),
        "STRATA_TLS_CERT_FILE": str(mine.cert_file),
        "STRATA_TLS_KEY_FILE": str(mine.key_file),
    }
    node = nodes.start(sys.executable, "-c", JOINING, name="joining", env=env)
    assert node.join(LIMIT_S) == 0, nodes.record.events
    (joined,) = nodes.record.of("joined")
    assert joined["connections"] == 0
    assert "strata.agent.standalone" in joined["words"]
    assert str(mine.key_file) not in joined["words"], "anybody may read a command line"


def test_a_certificate_error_is_two_lines_without_grpc_output(secured: Secured, tmp_path: Path) -> None:
    code, output = run_strata(
        "status", "--endpoints", secured.local.endpoints, *flags(prepared("no trust", secured, tmp_path))
    )
    assert code == 2
    error, hint = output.splitlines()
    assert re.match(r"error: the certificate of .* is not signed by our authority", error)
    assert hint.startswith("hint: ")


def test_no_key_is_in_any_log(secured: Secured) -> None:
    logs = "".join(path.read_text() for path in secured.local.logs.rglob("*.log"))
    assert "session_opened" in logs  # these logs come from real sessions
    assert "PRIVATE KEY" not in logs
    for key in secured.folder.rglob("*key.pem"):
        body = "".join(key.read_text().splitlines()[1:-1])
        assert body[:40] not in logs
        assert body[40:80] not in logs
