"""Settings that all tests share: where temporary files go, what a machine may lack, hypothesis profiles.

Nothing here starts a process. Helpers that start processes use `strata.processes.children`: such children die with
the process that started them, even if that process is killed.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.durations import Recorder

ROOT = Path(__file__).resolve().parent.parent

# Tests write their files inside the clone, in a folder for each run. pytest numbers these folders and keeps the last
# three, so several runs do not disturb each other. The path is short because the path of a Unix socket has at most
# 107 bytes.
_temporary = ROOT / ".strata" / "tmp"
_temporary.mkdir(parents=True, exist_ok=True)
os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_temporary)
tempfile.tempdir = None

# gRPC reads this variable once, at import. Without it a child that is forked from a process with grpc.aio crashes.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# torch looks up the name of the other end of every connection of its stores. Tests connect to this machine only. With
# a slow, distant name service each connection waited 10 s (seen: a minute until two ranks met).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell without job control starts background commands with SIGINT and SIGQUIT ignored; `nohup` does so with SIGHUP.
# Children inherit an ignored signal, so a command that a test interrupts would never end. A handled signal, in
# contrast, has its default action in every program that this process starts. The handler for SIGHUP does nothing, so
# that the run outlives its terminal.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, lambda *_: None),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
signal.pthread_sigmask(signal.SIG_SETMASK, ())

# No deadline: on a busy two-core machine any example is slow now and then. "thorough" is for a search overnight:
# HYPOTHESIS_PROFILE=thorough make test
hypothesis.settings.register_profile("default", deadline=None, database=None, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=5_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute files, not tests, among the processes; the hook exists only if pytest-xdist is installed."""
    from tests.side_by_side import ByFile  # noqa: PLC0415  # imports xdist

    return ByFile(config, log)


LAYERS = ("unit", "contract", "docs", "sim", "planted", "integration", "frameworks", "e2e", "schedules")
"""A test's layer is its folder. Each layer is also a marker for `-m` (the Makefile's QUICK)."""


def pytest_configure(config: pytest.Config) -> None:
    """Record how long tests take, in the process that receives the reports of all of them."""
    for layer in LAYERS:
        config.addinivalue_line("markers", f"{layer}: lies in tests/{layer}")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its layer, and run the files that take longest first."""
    from tests.side_by_side import rank  # noqa: PLC0415  # as above

    for item in items:
        item.add_marker(item.path.relative_to(ROOT / "tests").parts[0])
    items.sort(key=lambda item: rank(item.nodeid))


SHOWN = "shown"
"""A property of a test (`record_property`) that the end of the run prints."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the results that tests recorded, including those of other pytest processes."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, text in report.user_properties:
            if name == SHOWN:
                terminalreporter.write_line(f"\n{text}")


pytest_plugins = ["tests.cluster_fixtures", "tests.etcd_fixtures", "tests.secured_fixtures"]

Need = Callable[[str, bool, str], None]


def need(capability: str, present: bool, hint: str) -> None:
    """Continue if `present`; otherwise skip the test, or fail it if STRATA_REQUIRE lists the capability.

    CI lists the capabilities of its machine in STRATA_REQUIRE, so that no test is skipped unnoticed.
    """
    if present:
        return
    reason = f"needs {capability}: {hint}"
    if capability in os.environ.get("STRATA_REQUIRE", "").split(","):
        pytest.fail(f"STRATA_REQUIRE lists it, but the test {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(name="need", scope="session")
def _need() -> Need:
    """`need("docker", reachable, "start a container engine")` as a fixture."""
    return need


@pytest.fixture(scope="session")
def etcd_bin() -> Path:
    """The folder with etcd, etcdctl and etcdutl that `scripts/fetch-etcd` made."""
    folder = ROOT / ".tools" / "etcd" / "bin"
    need("etcd", (folder / "etcd").exists(), "run scripts/fetch-etcd")
    return folder


@pytest.fixture(scope="session")
def torch_installed() -> None:
    """Request this in a test that imports torch in a child process."""
    need("torch", importlib.util.find_spec("torch") is not None, "run scripts/bootstrap")


@pytest.fixture(scope="session")
def jax_installed() -> None:
    """Request this in a test that imports jax in a child process."""
    need("jax", importlib.util.find_spec("jax") is not None, "pip install jax")
