"""Tokens instead of client certificates, over TLS."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata import CoordinatorClient
from strata.config import Credentials
from strata.core.access.authority import Role
from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import ConfigError, PermissionDenied, StrataError, Unauthenticated
from strata.security.certificates import Authority
from strata.security.private import write_private
from strata.security.tokens import TokenFile
from strata.v1.admin_pb2 import GetStatusRequest
from tests.cluster_fixtures import Nodes
from tests.secured_fixtures import LIMIT_S, NOW, flags, issued

ACCEPTED = "accepted.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


def token(folder: Path, role: Role, id: str, *, jobs: tuple[str, ...] = ()) -> Credentials:  # noqa: A002
    entry, text = TokenFile(folder / ACCEPTED).add(role=role, id=id, jobs=jobs, now=NOW)
    path = folder / f"{entry.name}.token"
    write_private(path, text.encode())
    return Credentials(ca_file=folder / "ca" / "ca.pem", token_file=path)


@pytest.fixture(scope="module")
def local(etcd_binary: EtcdBinary, folder: Path) -> Iterator[LocalCluster]:
    authority = Authority.create(folder / "ca", cluster="default", now=NOW)

    def options(name: str) -> list[str]:
        mine = issued(authority, folder / name, Role.COORDINATOR, name)
        shown = token(folder, Role.COORDINATOR, name)
        tokens = (f"--token-file={shown.token_file}", f"--accepted-tokens-file={folder / ACCEPTED}")
        (folder / "strata.toml").write_text("[auth]\nreview_s = 0.5\n")
        return [*flags(mine), *tokens, f"--config={folder / 'strata.toml'}", "--log-format=json"]

    running = LocalCluster.start(
        folder / "data",
        etcd_members=1,
        coordinators=2,
        binary=etcd_binary,
        detect_s=2.0,
        fsync=False,
        options=options,
        credentials=token(folder, Role.VIEWER, "asking"),
    )
    yield running
    running.kill()


def client(local: LocalCluster, credentials: Credentials, *, job: str = "default") -> CoordinatorClient:
    return CoordinatorClient.connect(local.endpoints, job=job, timeout_s=LIMIT_S, credentials=credentials)


def test_a_token_determines_the_callers_identity(local: LocalCluster, folder: Path, job: str) -> None:
    with client(local, token(folder, Role.MEMBER, "w1", jobs=(job,)), job=job) as mine:
        assert mine.register(worker_id="w1").incarnation
        with pytest.raises(PermissionDenied, match="may not speak for"):
            mine.register(worker_id="w2")
        mine.leave(worker_id="w1")
    limited = token(folder, Role.MEMBER, "w1", jobs=(job,))
    with (
        client(local, limited, job="another") as mine,
        pytest.raises(PermissionDenied, match="in job another"),
    ):
        mine.register(worker_id="w1")


def test_replicas_authenticate_each_other_by_token(local: LocalCluster, folder: Path) -> None:
    with client(local, token(folder, Role.VIEWER, "v")) as mine:
        answer = mine.call_until(GetStatusRequest(), lambda s: sum(r.ready for r in s.replicas) == 2)
    assert [r.ready for r in answer.replicas] == [True, True]


@pytest.mark.parametrize(
    ("case", "cls", "printed"),
    [
        ("none", Unauthenticated, "requires a token, and none was sent"),
        ("wrong", Unauthenticated, "this cluster does not accept the token"),
        ("revoked", Unauthenticated, "this cluster does not accept the token"),
        ("readable", ConfigError, "can be read by others"),
        ("the hashes", ConfigError, "does not hold a token"),
        ("missing", ConfigError, "cannot read"),
    ],
)
def test_a_caller_with_an_invalid_token_is_refused_with_the_reason(
    local: LocalCluster, folder: Path, tmp_path: Path, case: str, cls: type[StrataError], printed: str
) -> None:
    mine = token(folder, Role.VIEWER, "v")
    held = mine.token_file
    assert held is not None
    if case == "none":
        mine = Credentials(ca_file=mine.ca_file)
    elif case == "wrong":
        held.write_text("strata_" + base64.urlsafe_b64encode(bytes(32)).decode().rstrip("="))
    elif case == "revoked":
        with client(local, mine) as before:
            assert before.status().cluster == "default"
        TokenFile(folder / ACCEPTED).revoke(held.stem)
    elif case == "readable":
        held.chmod(0o640)
    elif case == "the hashes":
        mine = Credentials(ca_file=mine.ca_file, token_file=folder / ACCEPTED)
    else:
        mine = Credentials(ca_file=mine.ca_file, token_file=tmp_path / "none")
    with client(local, mine) as asking, pytest.raises(StrataError) as caught:
        asking.status()
    assert type(caught.value) is cls, caught.value
    assert printed in caught.value.message
    assert caught.value.hint


@pytest.mark.journey
def test_a_run_with_a_token_and_no_secret_in_any_log(local: LocalCluster, folder: Path, nodes: Nodes) -> None:
    mine = token(folder, Role.MEMBER, "node-1")
    node = nodes.run(local.endpoints, "steps", "--steps", "3", options=flags(mine))
    assert node.join(LIMIT_S) == 0, nodes.record.events
    logs = "".join(path.read_text() for path in local.logs.rglob("*.log"))
    assert "session_opened" in logs
    logs += "".join(str(event) for event in nodes.record.events)
    for path in folder.rglob("*.token"):
        assert path.read_text().strip() not in logs
    assert "Bearer" not in logs
    for entry in TokenFile(folder / ACCEPTED).entries():
        assert entry.digest not in logs


@pytest.mark.slow
def test_a_training_continues_while_its_token_is_replaced(
    local: LocalCluster, folder: Path, nodes: Nodes, tmp_path: Path
) -> None:
    mine, stop = token(folder, Role.MEMBER, "node-1"), tmp_path / "stop"
    held = mine.token_file
    assert held is not None
    node = nodes.run(local.endpoints, "steps", "--until", str(stop), options=flags(mine))
    steps = 5
    nodes.record.until("steps", lambda _events: nodes.record.of("step", step=steps), limit_s=LIMIT_S)
    newer = token(folder, Role.MEMBER, "node-1").token_file
    assert newer is not None
    old = held.stem
    newer.replace(held)
    TokenFile(folder / ACCEPTED).revoke(old)

    def revoked(_events: object) -> bool:
        logs = "".join(path.read_text() for path in local.logs.rglob("*.log"))
        return any("stream_revoked" in line and "member node-1" in line for line in logs.splitlines())

    nodes.record.until("the end of its session", revoked, limit_s=LIMIT_S)
    steps = len(nodes.record.of("step")) + 20
    nodes.record.until("more steps", lambda _events: nodes.record.of("step", step=steps), limit_s=LIMIT_S)
    stop.touch()
    assert node.join(LIMIT_S) == 0, nodes.record.events
    assert len(nodes.record.of("start")) == 1, "no rank was started anew: it is one generation"
