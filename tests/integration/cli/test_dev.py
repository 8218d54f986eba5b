"""`strata dev` prints its addresses and leaves no process behind, however it ends."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.ports import free_port, is_free
from tests.cluster_fixtures import ROOT, Nodes, run_strata
from tests.processes import LIMIT_S, MARK, Record, Talker, marked

pytestmark = pytest.mark.usefixtures("etcd_binary")


def first_port(count: int) -> int:
    """Return the first of several consecutive free ports."""
    while True:
        port = free_port()
        if all(is_free(port + i) for i in range(count)):
            return port


def start(nodes: Nodes, folder: Path, *options: str, port: int) -> Talker:
    return nodes.strata("dev", "--data", str(folder), "--port", str(port), *options, name="dev")


def endpoints_of(record: Record) -> str:
    """Return the printed endpoints once everything is up."""
    return record.wait_line("endpoints:").split(": ", 1)[1]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.journey
def test_dev_prints_serving_endpoints_and_ends_on_ctrl_c(
    nodes: Nodes, record: Record, tmp_path: Path, count: int
) -> None:
    port = first_port(count)
    dev = start(nodes, tmp_path / "d", "--etcd-members", str(count), "-n", str(count), port=port)
    endpoints = endpoints_of(record)
    assert endpoints == ",".join(f"127.0.0.1:{port + i}" for i in range(count))
    with CoordinatorClient.connect(endpoints) as client:
        status = client.status()
    assert sorted(r.address for r in status.replicas) == endpoints.split(",")
    assert len(status.etcd) == count
    assert status.leader
    record.wait_line("Ctrl-C ends everything")
    assert len(dev.family()) == 1 + 2 * count
    os.killpg(dev.pid, signal.SIGINT)
    assert dev.join() == 0
    dev.wait_quiet()
    assert record.wait_line("stopped")
    assert "Traceback" not in str(record.events)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGQUIT])
def test_dev_leaves_no_process_after_any_signal(
    nodes: Nodes, record: Record, tmp_path: Path, number: signal.Signals
) -> None:
    dev = start(nodes, tmp_path / "d", "-n", "2", port=first_port(2))
    record.wait_line("Ctrl-C ends everything")
    os.kill(dev.pid, number)
    code = dev.join()
    dev.wait_quiet()
    assert code == (-number if number in {signal.SIGKILL, signal.SIGQUIT} else 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_dev_leaves_no_process_if_it_dies_during_startup(
    nodes: Nodes, record: Record, tmp_path: Path, number: signal.Signals
) -> None:
    dev = start(nodes, tmp_path / "d", "--etcd-members", "3", "-n", "3", port=first_port(3))
    record.wait_line("etcd")
    os.kill(dev.pid, number)
    dev.join()
    dev.wait_quiet()


def test_dev_ends_when_its_terminal_closes(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    mark = uuid.uuid4().hex
    dev = subprocess.Popen(
        # makes it the controlling terminal, so that the kernel sends SIGHUP when it closes
        [
            "setsid",
            "--ctty",
            sys.executable,
            "-m",
            "strata",
            "dev",
            "--data",
            str(tmp_path),
            "--port",
            str(first_port(1)),
        ],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, MARK: mark},
    )
    os.close(theirs)
    output = b""
    while b"Ctrl-C ends" not in output:
        output += os.read(ours, 4096)
    assert len(marked(mark)) == 3
    os.close(ours)
    dev.wait(LIMIT_S)
    assert marked(mark) == {}


@pytest.mark.journey
def test_data_and_jobs_are_there_again_after_a_restart(nodes: Nodes, record: Record, tmp_path: Path) -> None:
    port = first_port(1)
    uids: list[str] = []
    jobs: list[str] = []
    for _ in range(2):
        record = nodes.record = Record()
        dev = start(nodes, tmp_path / "d", port=port)
        with CoordinatorClient.connect(endpoints_of(record), job=nodes.job) as client:
            uids.append(client.status().token.uid)
            jobs = [job.name for job in client.jobs()]
            client.register(worker_id=f"w-{len(uids)}")
        dev.signal(signal.SIGTERM)
        assert dev.join() == 0
    assert uids[0] == uids[1]
    assert jobs == [nodes.job], "the second one knew the first one's job"


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, output = run_strata("dev", "--data", str(tmp_path / "d"), "--port", str(port))
    assert code == 2
    assert f"port {port} of 127.0.0.1 is taken" in output
    assert "Traceback" not in output
    assert not (tmp_path / "d").exists(), "nothing was started"


def test_a_missing_etcd_binary_is_reported_with_a_way_to_get_one(tmp_path: Path) -> None:
    missing = tmp_path / "etcd"
    code, output = run_strata("dev", "--etcd", str(missing), "--data", str(tmp_path / "d"))
    assert code == 2
    assert f"--etcd names {missing}, which does not exist" in output
    assert "hint: " in output
    assert "scripts/fetch-etcd" in output
    assert "Traceback" not in output
    code, output = run_strata(
        "dev", "--data", str(tmp_path / "d"), env={**os.environ, "STRATA_ETCD": str(missing)}
    )
    assert code == 2
    assert f"STRATA_ETCD names {missing}" in output


def test_an_etcd_that_is_too_old_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "etcd"
    old.write_text("#!/bin/sh\necho 'etcd Version: 3.3.10'\n")
    old.chmod(0o755)
    code, output = run_strata("dev", "--etcd", str(old), "--data", str(tmp_path / "d"))
    assert code == 2
    assert "3.3.10" in output


@pytest.mark.parametrize(
    "options", [("--etcd-members", "2"), ("-n", "0"), ("--port", "0"), ("--detect-s", "soon")], ids=" ".join
)
def test_wrong_numbers_are_usage_errors(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, output = run_strata("dev", "--data", str(tmp_path / "d"), *options)
    assert code == 2, output
    assert "Traceback" not in output
