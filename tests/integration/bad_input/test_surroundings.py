"""Mistakes in a program's environment (etcd, folders, certificates, forks) cause errors as clear as bad input does."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import datetime as dt
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

import strata
from strata import CoordinatorClient
from strata.cli.console.exits import Exit
from strata.config import Credentials
from strata.core.access.authority import Role
from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import ConfigError, PermissionDenied, StrataError, Unauthenticated, Unavailable
from strata.security.certificates import Authority
from strata.v1 import members_pb2, worlds_pb2
from tests.cluster_fixtures import StartCluster, run_strata
from tests.conftest import need
from tests.integration.bad_input.place import refusal
from tests.unit.etcd.fake_etcd import FakeEtcd

ROOT = Path(__file__).resolve().parents[3]
CLONE_NEWNS = 0x00020000


def output_and_code(*words: str, error: str, hint: str, code: Exit, **more: object) -> None:
    """Run a command; assert its error, hint and exit code, and that it prints no traceback."""
    ended, output = run_strata(*words, **more)  # type: ignore[arg-type]  # env and limit_s
    assert ended == code, output
    assert error in output
    assert hint in output
    assert "Traceback" not in output


# -- etcd -------------------------------------------------------------------------------------


@contextlib.contextmanager
def old_etcd(version: str) -> Iterator[str]:
    """Serve a fake etcd of that version; yield its address."""
    ready, over, where = threading.Event(), threading.Event(), [""]

    async def serve() -> None:
        async with FakeEtcd() as fake:
            fake.version = version
            where[0] = fake.address
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    ready.wait(10)
    yield where[0]
    over.set()
    thread.join()


@pytest.mark.parametrize("version", ["3.3.27", "2.3.8", "no version"])
def test_etcd_below_3_4_is_refused(version: str) -> None:
    with old_etcd(version) as address:
        output_and_code(
            *("coordinator", "--etcd", address, "--listen", "127.0.0.1:0", "--replica", "x", "--http", ""),
            error="etcd",
            hint="hint: ",
            code=Exit.USAGE,
        )


def test_a_coordinator_waits_for_an_unreachable_etcd_and_then_names_it() -> None:
    output_and_code(
        *("coordinator", "--etcd", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--replica", "x"),
        error="etcd did not answer within 1 s",
        hint="etcd.endpoints (--etcd)",
        code=Exit.UNAVAILABLE,
        env={**os.environ, "STRATA_ETCD_WAIT_S": "1"},
    )


@pytest.mark.slow
def test_without_an_etcd_quorum_replicas_serve_reads_and_fail_writes(start_cluster: StartCluster) -> None:
    """Replicas serve reads from their view, fail writes with `Unavailable`, and declare no member dead."""
    cluster = start_cluster(etcd_members=3, coordinators=2)
    where = cluster.endpoints
    with strata.connect(where, job="witness", worker_id="w0") as witness:
        for member in cluster.etcd.members[:2]:
            member.kill()
        request = members_pb2.RegisterRequest(
            registration=members_pb2.Registration(job="witness", worker_id="new", boot="b", slots=1)
        )
        with (
            CoordinatorClient.connect(where, job="witness") as client,
            pytest.raises(Unavailable) as caught,
        ):
            client.call(request, timeout_s=2)
        assert "a majority of etcd" in caught.value.hint
        status, error, _packed = refusal(cluster.coordinators[0].address, request, timeout_s=5)
        assert status in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
        assert isinstance(error, Unavailable)
        code, output = run_strata("members", "-e", where, "--job", "witness", "--timeout-s", "2")
        assert code in {Exit.OK, Exit.UNAVAILABLE}, output
        assert "Traceback" not in output
        for member in cluster.etcd.members[:2]:
            member.start()
        cluster.etcd.wait_healthy()
        assert witness.barrier("again", b"here", timeout_s=30) == {0: b"here"}


# -- folders and ports ------------------------------------------------------------------------


def read_only(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program with `folder` mounted read-only, in its own mount namespace.

    Root ignores file modes, so only a mount stops its writes.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    here = bytes(folder)

    def isolate() -> None:
        failed = (
            libc.unshare(CLONE_NEWNS)
            or libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
            or libc.mount(here, here, None, 0x1000, None)  # MS_BIND
            or libc.mount(b"none", here, None, 0x1021, None)  # and MS_REMOUNT | MS_RDONLY
        )
        if failed:
            os._exit(99)

    return subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, preexec_fn=isolate
    )


SAVES = """
import sys
from strata import CheckpointManager, StrataError
try:
    CheckpointManager(sys.argv[1]).save(b"x", step=1).wait(20)
except StrataError as error:
    print(type(error).__name__, "|", error.message, "|", error.hint)
"""


def test_a_read_only_folder_is_an_error_without_a_traceback(tmp_path: Path, etcd_bin: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    probe = read_only(folder, "touch", str(folder / "x"))
    need("mounts", "Read-only" in probe.stderr, "run as root, with CAP_SYS_ADMIN")
    done = read_only(folder, sys.executable, "-m", "strata", "dev", "--data", str(folder), "--port", "0")
    assert done.returncode == Exit.USAGE
    done = read_only(
        folder, sys.executable, "-m", "strata", "dev", "--data", str(folder / "dev"), "--port", "39731"
    )
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    assert done.returncode in {Exit.USAGE, Exit.FAILURE}
    assert "Read-only file system" in done.stderr
    assert "hint: " in done.stderr
    done = read_only(folder, sys.executable, "-c", SAVES, str(folder / "saves"))
    assert done.stderr.count("Traceback") == 0, done.stderr
    assert done.stdout.startswith("StorageError | cannot create")
    assert "the file system is read-only" in done.stdout


FORKS = """
import os, sys, strata
from strata import CoordinatorClient, StrataError
with strata.connect(sys.argv[1], job="forks", worker_id="f0") as client:
    asker = CoordinatorClient.connect(sys.argv[1], job="forks")
    asker.status()
    child = os.fork()
    if child == 0:
        for act in (
            lambda: client.barrier("b"),
            lambda: client.progress(1),
            lambda: asker.status(),
            lambda: strata.connect(sys.argv[1], job="forks", worker_id="f1"),
        ):
            try:
                act()
            except StrataError as error:
                print(type(error).__name__, "|", error.message, "|", error.hint, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print("parent", client.barrier("b", b"x"), flush=True)
"""


def test_a_call_from_a_forked_child_is_a_config_error(cluster: LocalCluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, cluster.endpoints],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    *child, parent = done.stdout.splitlines()
    assert len(child) == 4, done.stdout + done.stderr
    for line in child:
        assert line.startswith("ConfigError | process ")
        assert "'spawn' or 'forkserver'" in line
    assert parent == "parent {0: b'x'}"


# -- certificates -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Secured:
    """A cluster with TLS, and valid and invalid credentials."""

    cluster: LocalCluster
    folder: Path

    def credentials(self, name: str) -> Credentials:
        if name == "none":
            return Credentials(ca_file=self.folder / "w0" / "ca.pem")
        folder = self.folder / name
        return Credentials(
            ca_file=folder / "ca.pem", cert_file=folder / "cert.pem", key_file=folder / "key.pem"
        )


@pytest.fixture(scope="module")
def secured(etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    now = dt.datetime.now(dt.UTC)
    ours = Authority.create(folder / "ca", cluster="default", now=now)
    ours.issue(folder / "c1", role=Role.COORDINATOR, id="coordinator-1", hosts=("127.0.0.1",), now=now)
    ours.issue(folder / "op", role=Role.OPERATOR, id="op", now=now)
    ours.issue(folder / "w0", role=Role.MEMBER, id="w0", now=now)
    ours.issue(folder / "viewer", role=Role.VIEWER, id="v", now=now)
    past = now - dt.timedelta(days=30)
    ours.issue(folder / "expired", role=Role.MEMBER, id="w0", now=past, days=1)
    theirs = Authority.create(folder / "other-ca", cluster="default", now=now)
    theirs.issue(folder / "wrong-ca", role=Role.MEMBER, id="w0", now=now)
    flags = [
        *("--tls-ca-file", str(folder / "c1" / "ca.pem")),
        *("--tls-cert-file", str(folder / "c1" / "cert.pem")),
        *("--tls-key-file", str(folder / "c1" / "key.pem")),
    ]
    operator = Credentials(
        ca_file=folder / "op" / "ca.pem",
        cert_file=folder / "op" / "cert.pem",
        key_file=folder / "op" / "key.pem",
    )
    cluster = LocalCluster.start(
        folder / "cluster",
        etcd_members=1,
        coordinators=1,
        binary=etcd_binary,
        detect_s=2.0,
        fsync=False,
        options=lambda _name: flags,
        credentials=operator,
    )
    yield Secured(cluster=cluster, folder=folder)
    cluster.kill()


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The credentials that a client presents, and the error it gets when it registers as `worker`."""

    name: str
    error: type[StrataError]
    exit: Exit
    worker: str = "w0"
    plain: bool = False


@pytest.mark.parametrize(
    "shown",
    [
        Shown(name="wrong-ca", error=ConfigError, exit=Exit.USAGE),
        Shown(name="expired", error=ConfigError, exit=Exit.USAGE),
        Shown(name="none", error=Unauthenticated, exit=Exit.REFUSED),
        Shown(name="w0", worker="w1", error=PermissionDenied, exit=Exit.REFUSED),
        Shown(name="viewer", error=PermissionDenied, exit=Exit.REFUSED),
        Shown(name="none", plain=True, error=ConfigError, exit=Exit.USAGE),
    ],
    ids=lambda shown: f"{shown.name}{' as ' + shown.worker if shown.worker != 'w0' else ''}",
)
def test_wrong_credentials_are_refused_with_a_hint(shown: Shown, secured: Secured) -> None:
    where = secured.cluster.endpoints
    address = f"http://{where}" if shown.plain else where
    credentials = None if shown.plain else secured.credentials(shown.name)
    with (
        CoordinatorClient.connect(address, job="j", timeout_s=6, credentials=credentials) as client,
        pytest.raises(StrataError) as caught,
    ):
        client.register(worker_id=shown.worker, spec=worlds_pb2.JobSpec(min_workers=1, max_workers=1))
    assert type(caught.value) is shown.error, caught.value
    assert caught.value.hint
    flags = []
    if credentials is not None:
        flags += ["--tls-ca-file", str(credentials.ca_file)]
        if credentials.cert_file is not None:
            flags += ["--tls-cert-file", str(credentials.cert_file)]
            flags += ["--tls-key-file", str(credentials.key_file)]
    output_and_code(
        *("run", "--endpoints", address, "--job", "j", "--worker-id", shown.worker, *flags, "--", "true"),
        error="error: ",
        hint="hint: ",
        code=shown.exit,
    )
    assert secured.cluster.status().answered_by == "coordinator-1"
