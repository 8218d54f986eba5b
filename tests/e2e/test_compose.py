"""deploy/etcd's Compose file: started as its README describes, then exposed to faults."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from docker.errors import ContainerError
from docker.models.containers import Container
from testcontainers.compose import DockerCompose

from strata.devcluster.ports import free_ports
from tests.cluster_fixtures import RANKS, Nodes, run_strata
from tests.e2e.conftest import DEPLOY
from tests.e2e.engine import Engine
from tests.processes import Event, Record, Talker

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

ETCD = ("etcd-1", "etcd-2", "etcd-3")
COORDINATORS = ("coordinator-1", "coordinator-2", "coordinator-3")
UP_S = 120.0


class Deployment:
    """A Compose project with its own name, ports, images and certificates."""

    def __init__(self, engine: Engine, base_image: str, folder: Path, record: Record) -> None:
        self.engine = engine
        self.record = record
        self.project = f"strata-test-{secrets.token_hex(4)}"
        self.label = f"com.docker.compose.project={self.project}"
        self.tls = folder / "tls"
        # root may give each key to a user that exists only inside the containers
        self.uid = 10001 if os.geteuid() == 0 else os.geteuid()
        count = len(COORDINATORS)
        ports = free_ports(2 * count)
        self.ports = dict(zip(COORDINATORS, ports[:count], strict=True))
        self.http_ports = dict(zip(COORDINATORS, ports[count:], strict=True))
        variables = {
            **{f"STRATA_PORT_{name[-1]}": str(port) for name, port in self.ports.items()},
            **{f"STRATA_HTTP_PORT_{name[-1]}": str(port) for name, port in self.http_ports.items()},
            "BASE_IMAGE": base_image,
            "COMPOSE_PROJECT_NAME": self.project,
            "STRATA_TLS": str(self.tls),
            "STRATA_UID": str(self.uid),
            "STRATA_TAG": self.project,
        }
        (folder / "env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        self.compose = DockerCompose(
            context=DEPLOY,
            compose_file_name=str(DEPLOY / "compose.yaml"),
            env_file=str(folder / "env"),
            build=True,
            wait=False,  # Debian's Compose does not know --wait
            docker_command_path=engine.compose,
        )

    def prepare(self) -> None:
        """Make the certificates. Besides the images, which `up` builds, it needs nothing else."""
        owner = ("--owner", str(self.uid)) if os.geteuid() == 0 else ()
        self.engine.script(str(DEPLOY / "make-certs"), "--out", str(self.tls), *owner)

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Run a Compose command for which testcontainers has no method; return its output."""
        return self.engine.script(*self.compose.docker_compose_command(), *words, env=env)

    def container(self, service: str) -> Container:
        """The current container of a service, running or not."""
        labels = [self.label, f"com.docker.compose.service={service}"]
        (found,) = self.engine.client.containers.list(all=True, filters={"label": labels})
        return found

    def times(self, what: str, service: str) -> int:
        """The number of events of that kind on a service's container."""
        return len(self.record.of("container", what=what, service=service))

    def wait_healthy(self, service: str, *, after: int = 0) -> None:
        """Return once the container has become healthy more than `after` times."""
        facts = {"what": "health_status: healthy", "service": service}
        self.record.wait("container", count=after + 1, limit_s=UP_S, **facts)

    def credentials(self, who: str) -> dict[str, str]:
        """The environment for a process of this host to use the identity `who`."""
        folder = self.tls / who
        return {
            "STRATA_ENDPOINTS": ",".join(f"127.0.0.1:{port}" for port in self.ports.values()),
            "STRATA_TLS_CERT_FILE": str(folder / "cert.pem"),
            "STRATA_TLS_KEY_FILE": str(folder / "key.pem"),
            "STRATA_TLS_CA_FILE": str(folder / "ca.pem"),
        }

    def issue(self, authority: str, role: str, name: str) -> None:
        """Sign a certificate in addition to those of make-certs."""
        code, printed = run_strata(
            *("certs", "issue", "--ca", str(self.tls / authority), "--role", role, "--id", name),
            *("--out", str(self.tls / name)),
        )
        assert code == 0, printed

    def status(self) -> dict[str, Any]:
        """The output of `strata status` for the operator of this host."""
        code, printed = run_strata("status", "--json", env={**os.environ, **self.credentials("operator")})
        assert code == 0, printed
        answer: dict[str, Any] = json.loads(printed)
        return answer

    def trust(self) -> ssl.SSLContext:
        """The operator's trust anchor and client certificate."""
        folder = self.tls / "operator"
        context = ssl.create_default_context(cafile=folder / "ca.pem")
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        return context

    def metrics(self, service: str) -> str:
        """The metrics that a coordinator serves to Prometheus."""
        url = f"https://localhost:{self.http_ports[service]}/metrics"
        with urllib.request.urlopen(url, timeout=10, context=self.trust()) as answer:
            return str(answer.read().decode())

    def down(self) -> None:
        self.compose.stop()
        for image in self.images():
            self.engine.client.images.remove(image, force=True)

    def images(self) -> list[str]:
        """The tags of the images that Compose built for this project."""
        every = (tag for image in self.engine.client.images.list() for tag in image.tags)
        return [tag for tag in every if tag.endswith(f":{self.project}")]

    def left(self) -> list[str]:
        """The objects of the project that the engine still has."""
        ours: dict[str, str | list[str] | bool] = {"label": self.label}
        client = self.engine.client
        return [
            *(str(one.name) for one in client.containers.list(all=True, filters=ours)),
            *(str(one.name) for one in client.networks.list(filters=ours)),
            *(str(one.name) for one in client.volumes.list(filters=ours)),
            *self.images(),
        ]


@pytest.fixture
def deployment(engine: Engine, build_context: str, tmp_path: Path, record: Record) -> Iterator[Deployment]:
    made = Deployment(engine, build_context, tmp_path, record)
    with engine.following(made.label, record):
        try:
            made.prepare()
            yield made
        finally:
            if made.left():
                made.down()


def test_a_compose_deployment_serves_a_job_without_one_coordinator_and_one_etcd_member(
    deployment: Deployment, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    deployment.compose.start()
    for service in (*ETCD, *COORDINATORS):
        deployment.wait_healthy(service)
    status = deployment.status()
    assert sorted(r["replica"] for r in status["replicas"]) == list(COORDINATORS)
    assert [member["healthy"] for member in status["etcd"]] == [True] * 3
    assert all("\nstrata_ready 1" in deployment.metrics(service) for service in COORDINATORS)

    members = start_members(deployment, nodes)
    met(record, more=3)

    # a crash, so that the engine's restart policy acts; after docker's own kill the policy would not act
    leader = status["leader"]
    healthy = deployment.times("health_status: healthy", leader)
    os.kill(int(deployment.container(leader).attrs["State"]["Pid"]), signal.SIGKILL)
    met(record, more=20)
    deployment.wait_healthy(leader, after=healthy)

    deployment.container("etcd-2").kill()
    met(record, more=20)
    healthy = deployment.times("health_status: healthy", "etcd-2")
    deployment.compose.build = False
    deployment.compose.start()
    deployment.wait_healthy("etcd-2", after=healthy)

    assert {e["generation"] for e in record.of("met")} == {1}, "somebody was taken for dead"
    check_certificates(deployment)
    replace_a_lost_member(deployment, nodes)
    check_backup(deployment, tmp_path / "backups")
    met(record, more=3)
    assert {e["generation"] for e in record.of("met")} == {1}, "somebody was taken for dead"
    members[0].signal(signal.SIGTERM)
    assert [member.join() for member in members] == [0, 0, 0]

    deployment.container("coordinator-1").stop()
    ended = deployment.container("coordinator-1").attrs["State"]["ExitCode"]
    assert ended == 0, "SIGTERM did not reach it"
    deployment.down()
    assert deployment.left() == []


def start_members(deployment: Deployment, nodes: Nodes) -> list[Talker]:
    """Start three trainers on the host, each with a certificate of its own."""
    started = []
    for name in ("node-1", "node-2", "node-3"):
        deployment.issue("ca", "member", name)
        env = {**deployment.credentials(name), "STRATA_JOB": nodes.job, "STRATA_WORKER_ID": name}
        started.append(
            nodes.start(sys.executable, str(RANKS / "meeting.py"), "--members", "3", name=name, env=env)
        )
    return started


def met(record: Record, *, more: int) -> None:
    """Return once each of the three members has passed `more` barriers from now on."""
    sources = ("node-1", "node-2", "node-3")
    before = {source: len(record.of("met", source=source)) for source in sources}
    for source, count in before.items():
        record.wait("met", count=count + more, source=source, limit_s=60.0)


def check_certificates(deployment: Deployment) -> None:
    """No trainer's certificate gives access to etcd; new certificates are served without a restart."""
    assert "is healthy" in etcd_health(deployment, "coordinator-1-etcd")
    with pytest.raises(ContainerError, match="unhealthy"):
        etcd_health(deployment, "node-1")

    old = served_certificate(deployment)
    owner = ("--owner", str(deployment.uid)) if os.geteuid() == 0 else ()
    deployment.engine.script(str(DEPLOY / "make-certs"), "--out", str(deployment.tls), "--renew", *owner)
    on_disk = ssl.PEM_cert_to_DER_cert((deployment.tls / "coordinator-1" / "cert.pem").read_text())
    deadline = time.monotonic() + 30
    while (now := served_certificate(deployment)) == old:
        assert time.monotonic() < deadline, "the coordinator still serves its old certificate"
    assert now == on_disk
    assert deployment.status()["leader"]


def replace_a_lost_member(deployment: Deployment, nodes: Nodes) -> None:
    """etcd's leader is lost with its volume, and is replaced immediately by the README's commands."""
    etcd = ("exec", "-T", "coordinator-1", "strata", "etcd")
    members = json.loads(deployment.run(*etcd, "status", "--json"))["members"]
    (lost,) = (member["name"] for member in members if member["role"] == "leader")
    deployment.container(lost).kill()
    command = deployment.compose.docker_compose_command()
    replacing = nodes.start(
        *command, *etcd, "replace-member", lost, name="replace-member", env={"PYTHONPATH": None}
    )
    nodes.record.until("a learner", lambda events: learner_added(events, replacing))
    deployment.run("rm", "-fs", lost)
    deployment.engine.client.volumes.get(f"{deployment.project}_{lost}").remove()
    deployment.run("up", "-d", "--no-deps", lost, env={"ETCD_INITIAL_CLUSTER_STATE": "existing"})
    assert replacing.join() == 0
    assert "3 of 3 voters healthy" in deployment.run(*etcd, "status")


def learner_added(events: Sequence[Event], replacing: Talker) -> bool:
    """Return True once the learner was added; fail if the command ends first."""
    printed = [str(event.get("text")) for event in events if event.get("source") == replacing.name]
    added = any("added learner" in text for text in printed)
    assert added or replacing.child.poll() is None, printed
    return added


def check_backup(deployment: Deployment, folder: Path) -> None:
    """The README's command makes a backup into a folder of the host."""
    folder.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(folder, deployment.uid, deployment.uid)
    mounted = ("run", "--rm", "--no-deps", "-v", f"{folder}:/backups", "coordinator-1")
    deployment.run(*mounted, "controlplane", "backup", "--to", "/backups")
    deployment.run(*mounted, "controlplane", "verify", "/backups")  # a broken backup exits with 1


def etcd_health(deployment: Deployment, who: str) -> str:
    """Check an etcd member's health from its network, with the certificate of `who`, trusting etcd's authority."""
    if not (trusted := deployment.tls / who / "ca-etcd.pem").exists():
        trusted.write_bytes((deployment.tls / "ca-etcd" / "ca.pem").read_bytes())
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", str(deployment.uid), deployment.tls / who], check=True)
    tls = ("--cacert=/tls/ca-etcd.pem", "--cert=/tls/cert.pem", "--key=/tls/key.pem")
    printed = deployment.engine.client.containers.run(
        f"strata-etcd:{deployment.project}",
        ["--endpoints=https://etcd-1:2379", *tls, "--command-timeout=5s", "endpoint", "health"],
        entrypoint="etcdctl",
        network=f"{deployment.project}_etcd",
        volumes={str(deployment.tls / who): {"bind": "/tls", "mode": "ro"}},
        remove=True,
        stderr=True,
    )
    return str(printed.decode())


def served_certificate(deployment: Deployment) -> bytes:
    """The certificate that coordinator-1 serves on a new connection."""
    context = deployment.trust()
    context.set_alpn_protocols(["h2"])
    address = ("127.0.0.1", deployment.ports["coordinator-1"])
    with (
        socket.create_connection(address, timeout=10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
    assert shown is not None
    return shown
