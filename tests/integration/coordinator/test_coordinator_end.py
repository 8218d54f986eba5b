"""A coordinator shuts down cleanly and with its own exit code, even if nothing reads its output."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from strata.devcluster.etcd_cluster import EtcdCluster
from strata.processes.children import Child

LIMIT_S = 40.0
BOTH = (signal.SIGTERM, signal.SIGINT)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def coordinator(stderr: int, *options: str) -> Iterator[Child]:
    argv = [sys.executable, "-m", "strata", "coordinator", "--http=", "--log-format=json", *options]
    child = Child.start(argv, stdout=stderr, stderr=stderr)
    os.close(stderr)
    try:
        yield child
    finally:
        child.kill()
        child.join()


@contextlib.contextmanager
def received(*options: str) -> Iterator[tuple[Child, BinaryIO]]:
    """Run a coordinator; yield its process and its output."""
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as pipe, coordinator(theirs, *options) as child:
        yield child, pipe


def wait_for(pipe: BinaryIO, word: bytes) -> None:
    output = b""
    for line in pipe:
        output += line
        if word in line:
            return
    raise AssertionError(f"it never said {word!r} but {output!r}")


def wait_until_served(address: str, child: Child) -> None:
    host, port = address.split(":")
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError:
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.02)
        else:
            return


def pester(child: Child) -> int:
    """Send both signals repeatedly until the process has ended; return its exit code."""
    deadline = time.monotonic() + LIMIT_S
    while child.poll() is None:
        assert time.monotonic() < deadline
        for number in BOTH:
            child.send_signal(number)
        time.sleep(0.001)
    return child.join()


@pytest.mark.parametrize("number", BOTH)
def test_a_coordinator_whose_output_reader_closed_serves_and_exits_cleanly(
    etcd: EtcdCluster, number: signal.Signals
) -> None:
    where = free_address()
    options = (f"--etcd={','.join(etcd.endpoints)}", f"--cluster=unread-{number.name}", f"--listen={where}")
    with received(*options) as (child, pipe):
        wait_for(pipe, b"leadership_taken")
        pipe.close()
        wait_until_served(where, child)
        child.send_signal(number)
        assert child.join(LIMIT_S) == 0


def test_a_coordinator_that_logs_to_a_full_disk_serves_and_exits_cleanly(etcd: EtcdCluster) -> None:
    where = free_address()
    full = os.open("/dev/full", os.O_WRONLY)
    options = (f"--etcd={','.join(etcd.endpoints)}", "--cluster=full-disk", f"--listen={where}")
    with coordinator(full, *options) as child:
        wait_until_served(where, child)
        child.send_signal(signal.SIGTERM)
        assert child.join(LIMIT_S) == 0


def test_a_wrong_option_keeps_its_exit_code_if_the_error_cannot_be_written() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with coordinator(full, "--etcd=127.0.0.1:1", "--replica=no/name") as child:
        assert child.join(LIMIT_S) == 2


def test_a_command_with_closed_standard_streams_keeps_its_exit_code() -> None:
    """Python sets a closed standard stream to None, which must not change the exit code to 1."""

    def code(*words: str) -> int:
        argv = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-m", "strata", *words]
        return Child.start(argv).join(LIMIT_S)

    assert code("--version") == 0
    assert code("status", "--no-such-option") == 2
    assert code("coordinator", "--etcd=127.0.0.1:1", "--replica=no/name") == 2
    assert code("run", "--no-such-option") == 2


def test_a_coordinator_with_closed_standard_streams_serves_and_exits_cleanly(etcd: EtcdCluster) -> None:
    where = free_address()
    argv = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-m", "strata", "coordinator", "--http="]
    options = (f"--etcd={','.join(etcd.endpoints)}", "--cluster=closed-streams", f"--listen={where}")
    child = Child.start([*argv, *options])
    try:
        wait_until_served(where, child)
        child.send_signal(signal.SIGTERM)
        assert child.join(LIMIT_S) == 0
    finally:
        child.kill()
        child.join()


def test_a_second_signal_does_not_change_how_a_coordinator_exits(etcd: EtcdCluster) -> None:
    """A second Ctrl-C neither changes the exit code nor causes a traceback in gRPC."""
    options = (f"--etcd={','.join(etcd.endpoints)}", "--cluster=pestered", f"--listen={free_address()}")
    with received(*options) as (child, pipe):
        wait_for(pipe, b"leadership_taken")
        child.send_signal(signal.SIGINT)
        wait_for(pipe, b"coordinator_ended")
        assert pester(child) == 0
        assert b"Traceback" not in pipe.read()


def test_signals_do_not_change_the_exit_code_of_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_ETCD_WAIT_S", "0.5")
    with received(f"--etcd={free_address()}", f"--listen={free_address()}") as (child, pipe):
        wait_for(pipe, b"error:")
        assert pester(child) == 3
        assert b"Traceback" not in pipe.read()


def test_signals_during_a_coordinators_shutdown_do_not_interrupt_it(etcd: EtcdCluster) -> None:
    options = (f"--etcd={','.join(etcd.endpoints)}", "--cluster=hurried", f"--listen={free_address()}")
    with received(*options) as (child, pipe):
        wait_for(pipe, b"coordinator_starts")
        assert pester(child) == 0
        output = pipe.read()
        assert b"coordinator_ended" in output
        assert b"Traceback" not in output
