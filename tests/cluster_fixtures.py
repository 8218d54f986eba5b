"""Fixtures for a whole control plane, and for nodes that run ranks on it.

`cluster` is three coordinators over one etcd member, shared by the whole run: a test must break nothing in it and
must use the name that the `job` fixture gives. `start_cluster` starts a cluster that a test may break, and
`start_module_cluster` one for the tests of a module. `nodes` starts `strata run` and other processes whose output is
read, and ensures that none of them is left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.local_cluster import LocalCluster
from strata.processes.children import Child
from tests.processes import LIMIT_S, Record, Talker

ROOT = Path(__file__).resolve().parent.parent
RANKS = ROOT / "tests" / "ranks"
DETECT_S = 2.0
"""The failure detection timeout of tests that do not depend on it: short."""

_numbers = itertools.count(1)


class StartCluster(Protocol):
    """The fixtures `start_cluster` and `start_module_cluster`: the clusters end with the test or its module."""

    def __call__(
        self, *, etcd_members: int = 1, coordinators: int = 3, detect_s: float = DETECT_S
    ) -> LocalCluster: ...


@pytest.fixture(scope="session")
def cluster(etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three coordinators over one etcd member, shared by the whole run; break nothing."""
    local = LocalCluster.start(
        tmp_path_factory.mktemp("cluster"),
        etcd_members=1,
        coordinators=3,
        binary=etcd_binary,
        detect_s=DETECT_S,
        fsync=False,
    )
    yield local
    local.kill()


@pytest.fixture
def start_cluster(
    etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartCluster]:
    """A function that starts a cluster for this test, which may kill and freeze the cluster's processes."""
    with _starting(etcd_binary, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="module")
def start_module_cluster(
    etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartCluster]:
    """`start_cluster` for a cluster that the tests of a module share."""
    with _starting(etcd_binary, tmp_path_factory) as start:
        yield start


@contextlib.contextmanager
def _starting(etcd_binary: EtcdBinary, folders: pytest.TempPathFactory) -> Iterator[StartCluster]:
    with contextlib.ExitStack() as running:

        def start(
            *, etcd_members: int = 1, coordinators: int = 3, detect_s: float = DETECT_S
        ) -> LocalCluster:
            local = LocalCluster.start(
                folders.mktemp("cluster"),
                etcd_members=etcd_members,
                coordinators=coordinators,
                binary=etcd_binary,
                detect_s=detect_s,
                fsync=False,
            )
            running.callback(local.kill)
            return local

        yield start


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """A job name that no other test uses."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:80].strip("-")
    return f"{name}-{next(_numbers)}"


@pytest.fixture
def record() -> Record:
    """The events of this test's processes."""
    return Record()


class Nodes:
    """Starts the processes of one test."""

    def __init__(self, record: Record, job: str) -> None:
        self.record = record
        self.job = job
        self.talkers: list[Talker] = []

    def start(
        self,
        *argv: str,
        name: str,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        new_session: bool = False,
    ) -> Talker:
        """Start any program; `env` is added to this process's environment, and None removes a variable."""
        merged = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        whole = {key: value for key, value in merged.items() if value is not None}
        talker = Talker(argv, name=name, record=self.record, env=whole, cwd=cwd, new_session=new_session)
        self.talkers.append(talker)
        return talker

    def strata(
        self, *words: str, name: str = "strata", env: Mapping[str, str | None] | None = None
    ) -> Talker:
        """Start a `strata` command."""
        return self.start(sys.executable, "-m", "strata", *words, name=name, env=env)

    def run(
        self,
        endpoints: str,
        script: str,
        *arguments: str,
        node: str = "node-1",
        options: tuple[str, ...] = (),
        env: Mapping[str, str | None] | None = None,
    ) -> Talker:
        """Start `strata run` of one of the scripts in tests/ranks for this test's job."""
        return self.run_script(
            endpoints, RANKS / f"{script}.py", *arguments, node=node, options=options, env=env
        )

    def run_script(
        self,
        endpoints: str,
        script: Path,
        *arguments: str,
        node: str = "node-1",
        options: tuple[str, ...] = (),
        env: Mapping[str, str | None] | None = None,
    ) -> Talker:
        """Start `strata run` of any Python script for this test's job."""
        given = ("--endpoints", endpoints, "--job", self.job, "--worker-id", node, "--log-format", "json")
        command = (sys.executable, str(script), *arguments)
        return self.strata("run", *given, *options, "--", *command, name=node, env=env)

    def end(self) -> None:
        """Kill the processes that still run, and check that no process is left."""
        for talker in self.talkers:
            talker.child.resume()
            talker.child.kill()
        for talker in self.talkers:
            talker.join()
            talker.wait_quiet(LIMIT_S)


@pytest.fixture
def nodes(record: Record, job: str) -> Iterator[Nodes]:
    """Starts processes whose output is read; after the test, they and all processes that they started have ended."""
    it = Nodes(record, job)
    yield it
    it.end()


def run_strata(
    *words: str, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> tuple[int, str]:
    """Run a `strata` command to its end; return its exit code and its whole output."""
    record = Record()
    talker = Talker([sys.executable, "-m", "strata", *words], name="strata", record=record, env=env)
    code = talker.join(limit_s)
    talker.wait_quiet()
    return code, "\n".join(str(e.get("text", e)) for e in record.events)


def shown(words: str, *command: str, limit_s: float = 15.0) -> str:
    """Return a command's output once it contains these words: other replicas see a change a little later."""
    deadline = time.monotonic() + limit_s
    while words not in (printed := run_strata(*command)[1]):
        assert time.monotonic() < deadline, f"{words!r} is not in:\n{printed}"
    return printed


def restart_all(cluster: LocalCluster) -> None:
    """Start every process of a cluster that does not run."""
    for member in cluster.etcd.members:
        if not member.running:
            member.start()
    cluster.etcd.wait_healthy()
    for coordinator in cluster.coordinators:
        child: Child = coordinator.child
        if child.poll() is not None:
            coordinator.restart()
    for coordinator in cluster.coordinators:
        coordinator.wait_ready(LIMIT_S)
