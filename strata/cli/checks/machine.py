"""Checks of this machine for `strata doctor`: system, open files, clock, name service, fork, installed extras."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from strata.agent.addresses import address_towards
from strata.cli.checks.finding import Finding, fail, ok, warn
from strata.cli.console.extras import SERVER_HINT, missing_server_modules
from strata.client import parse_endpoints
from strata.errors import StrataError
from strata.transport.name_lookup import ADVICE, SLOW_S, lookup_s

MIN_OPEN_FILES: Final = 4096
NTP: Final = ("timedatectl set-ntp true", "chronyc makestep")
"""Commands that start time synchronization, and a command that sets the clock immediately."""
_TIME_ERROR: Final = 5
"""The return value of adjtimex while the clock is not synchronized."""


def machine() -> Iterator[Finding]:
    """Check Python, gRPC, the system, and the limit of open files."""
    yield ok("python", platform.python_version())
    yield ok("grpc", metadata.version("grpcio"))
    if sys.platform != "linux":
        yield fail("system", platform.platform(), "Strata runs on Linux: it uses pidfd, PDEATHSIG and /proc")
    else:
        yield ok("system", platform.platform())
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        yield warn(
            "open files",
            f"{soft} at most",
            f"a coordinator has one a member: ulimit -n {MIN_OPEN_FILES}, or more",
        )
    else:
        yield ok("open files", f"{soft} at most")


def clock() -> Finding:
    """Check that the wall clock is synchronized. No safety property depends on the clock."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(512))  # modes 0: read only
    if state < 0:
        return warn(
            "clock", os.strerror(ctypes.get_errno()), "the kernel does not report it; is this a container?"
        )
    if state == _TIME_ERROR:
        return warn(
            "clock",
            "not synchronized",
            "run an NTP client: certificates and the times of checkpoints go by it",
            NTP[0],
        )
    return ok("clock", "synchronized")


def names(endpoints: str, *, timeout_s: float) -> Iterator[Finding]:
    """Check how long the name service takes to resolve a coordinator's name and our own address."""
    try:
        towards = parse_endpoints(endpoints)[0]
    except StrataError:
        return  # `cluster` reports the invalid endpoints
    answers: list[tuple[str, float]] = []

    def look() -> None:
        began = time.monotonic()
        address = address_towards(towards.host or "localhost", towards.port)
        lookup_s(address)
        answers.append((address, time.monotonic() - began))

    limit_s = max(timeout_s, 2 * SLOW_S)
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(limit_s)
    if not answers:
        yield warn("names", f"the name service did not answer within {limit_s:g} s", ADVICE)
    elif answers[0][1] > SLOW_S:
        yield warn("names", f"looking up {answers[0][0]} took {answers[0][1]:.1f} s", ADVICE)
    else:
        yield ok("names", f"{answers[0][0]} was looked up in {1000 * answers[0][1]:.0f} ms")


def fork() -> Finding:
    """Check that DataLoader workers may be forked from a process that has a session."""
    setting = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "0").lower()
    if setting in {"1", "true", "yes"}:
        return fail(
            "fork",
            "GRPC_ENABLE_FORK_SUPPORT is on",
            "unset it: with it, forked DataLoader workers crash in grpc",
        )
    if not Path("/proc/self/fd").is_dir():
        return fail("fork", "/proc is not there", "mount it: forked workers find the sockets to close in it")
    return ok("fork", "forked workers are safe")


def server_extra() -> Finding:
    """Check that the modules of a coordinator are installed."""
    if lacking := missing_server_modules():
        return warn(
            "server",
            f"no coordinator can run here: {', '.join(lacking)} missing",
            f"fine for a trainer; else {SERVER_HINT}",
        )
    if importlib.util.find_spec("uvloop") is None:
        return warn("server", "uvloop is missing", "coordinators take a third more CPU without it")
    return ok("server", "a coordinator can run here")
