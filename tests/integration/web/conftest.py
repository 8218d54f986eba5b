"""Three replicas of `web.fixture`, each its own process, and a browser."""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from strata.devcluster.ports import free_port
from strata.processes.children import Child
from tests.conftest import ROOT, need
from tests.e2e.browser import Browser, browsing
from tests.processes import LIMIT_S

BUNDLE = ROOT / "strata" / "dashboard" / "bundle" / "index.html"
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The replicas in order: `processes[0]` is r1, which serves at `origins[0]`."""

    origins: tuple[str, ...]
    processes: tuple[Child, ...]

    def get(self, path: str, replica: int = 1) -> Any:
        """Return the answer of a replica's API."""
        with urllib.request.urlopen(f"{self.origins[replica - 1]}/api/v1{path}", timeout=LIMIT_S) as answer:
            return json.load(answer)


class StartReplicas(Protocol):
    def __call__(self, *flags: str) -> Replicas: ...


@contextmanager
def replicas(folder: Path, *flags: str) -> Iterator[Replicas]:
    ports = [free_port() for _ in range(3)]
    state, began = folder / "actions.json", time.time() - 2.2 * 3600
    common = [sys.executable, "-m", "web.fixture", "--ports", *map(str, ports), *flags]
    common += ["--state", str(state), "--began", str(began), "--only"]
    with ExitStack() as stack:
        started = []
        for number in range(1, 4):
            log = folder / f"r{number}.log"
            started.append(Child.start([*common, str(number)], log=log, cwd=ROOT))
            stack.callback(started[-1].stop)
        origins = tuple(f"http://127.0.0.1:{port}" for port in ports)
        for origin, process in zip(origins, started, strict=True):
            _wait_for(origin, process)
        yield Replicas(origins=origins, processes=tuple(started))


def _wait_for(origin: str, process: Child) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            urllib.request.urlopen(origin, timeout=LIMIT_S).close()
            return
        except urllib.error.URLError:
            assert time.monotonic() < deadline, process.tail()
            time.sleep(0.05)


@pytest.fixture(scope="package")
def chromedriver() -> str:
    found = shutil.which("chromedriver") if shutil.which("chromium") else None
    need("browser", found is not None, "apt-get install chromium chromium-driver")
    assert found is not None
    return found


@pytest.fixture(scope="package")
def axe() -> str:
    """The source of axe-core, which the tests run in the page."""
    need("web", AXE.exists(), "run scripts/build-web")
    return AXE.read_text()


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with replicas(tmp_path_factory.mktemp("replicas")) as found:
        yield found


@pytest.fixture
def start_replicas(tmp_path: Path) -> Iterator[StartReplicas]:
    """Start replicas for one test, which may kill them."""
    with ExitStack() as stack:

        def start(*flags: str) -> Replicas:
            return stack.enter_context(replicas(tmp_path, *flags))

        yield start


@pytest.fixture
def browser(chromedriver: str, tmp_path: Path) -> Iterator[Browser]:
    with browsing(chromedriver, tmp_path, "--window-size=1440,900") as found:
        yield found


@pytest.fixture
def says(browser: Browser) -> Callable[[str], None]:
    """Return a function that waits until the page shows a text."""
    return lambda text: browser.wait(text, lambda: text in browser.text())
