"""The dashboard in a real browser, with three real coordinators and a real training."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from strata.devcluster.local_cluster import LocalCluster
from strata.processes.children import Child
from tests.cluster_fixtures import StartCluster
from tests.conftest import ROOT, need
from tests.e2e.browser import Browser, browsing
from tests.integration.web.pages import click
from tests.processes import LIMIT_S

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]

FAILOVER_S = 3.0
TRAINING = """
import time, torch, strata
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optim = torch.optim.SGD(model.parameters(), 0.1)
run = strata.init(model=model, optim=optim, save_every_steps=20, total_steps=100000, replicated=True)
while True:
    loss = model(torch.ones(2, 4)).pow(2).mean()
    optim.zero_grad(); loss.backward(); optim.step()
    run.report({"train/loss": loss.item()})
    run.step_done(8)
    time.sleep(0.05)
"""
STUCK = """
import time, strata
client = strata.connect()
client.progress(step=1, phase="waits for nobody" if client.rank else "sync")
if client.rank == 0:
    client.barrier("sync")
time.sleep(1000)
"""
STEP = "return Number(document.querySelector('dd span').textContent.replaceAll(',', ''))"


@pytest.fixture(scope="module")
def chromedriver() -> str:
    found = shutil.which("chromedriver") if shutil.which("chromium") else None
    need("browser", found is not None, "apt-get install chromium chromium-driver")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def local(
    start_module_cluster: StartCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """Three coordinators, a job that trains and a job that is stuck."""
    cluster, folder = start_module_cluster(coordinators=3), tmp_path_factory.mktemp("jobs")
    with ExitStack() as stack:
        for job, program in (("gpt", TRAINING), ("stuck", STUCK)):
            script = folder / f"{job}.py"
            script.write_text(program)
            command = [
                sys.executable,
                "-m",
                "strata",
                "run",
                f"--endpoints={cluster.endpoints}",
                f"--job={job}",
            ]
            command += ["--slots=2", f"--log-dir={folder}", "--", sys.executable, str(script)]
            environment = {**_environment(), "STRATA_TRAIN_STORAGE": str(folder / "checkpoints")}
            stack.callback(Child.start(command, log=folder / f"{job}.log", cwd=ROOT, env=environment).kill)
        yield cluster


def _environment() -> dict[str, str]:
    import os  # noqa: PLC0415

    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def browser(chromedriver: str, tmp_path: Path) -> Iterator[Browser]:
    with browsing(chromedriver, tmp_path, "--window-size=1440,900") as found:
        yield found


def get(local: LocalCluster, path: str, replica: int = 0) -> Any:
    url = f"http://{local.coordinators[replica].http}/api/v1{path}"
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        return json.load(answer)


def says(browser: Browser, text: str) -> None:
    browser.wait(text, lambda: text in browser.text())


def test_the_missing_rank_of_a_stuck_barrier_is_found_in_two_clicks(
    local: LocalCluster, browser: Browser
) -> None:
    browser.open(f"http://{local.coordinators[0].http}/")
    says(browser, "stuck")
    click(browser, "stuck")
    says(browser, "generation 1")
    browser.wait("the barrier", lambda: "sync" in browser.text())
    click(browser, "Barriers")
    says(browser, "Rank 1 is missing")
    assert "waits for nobody" in browser.text()
    assert browser.complaints() == []


def test_a_checkpoint_pinned_on_the_dashboard_is_pinned_for_the_command(
    local: LocalCluster, browser: Browser
) -> None:
    browser.open(f"http://{local.coordinators[0].http}/jobs/gpt/checkpoints")
    browser.wait("a checkpoint", lambda: "committed" in browser.text().lower())
    click(browser, "Pin checkpoint of step")
    browser.wait("the question", lambda: browser.run("return !!document.querySelector('dialog')"))
    browser.run("document.querySelector('dialog button[type=submit]').click()")
    browser.wait("the answer", lambda: not browser.run("return !!document.querySelector('dialog')"))
    browser.wait("the mark", lambda: "pinned" in browser.text())
    pinned = [
        each["step"] for each in get(local, "/jobs/gpt/checkpoints", 1)["checkpoints"] if each["pinned"]
    ]
    assert len(pinned) == 1
    command = [sys.executable, "-m", "strata", "checkpoints", "list", f"--endpoints={local.endpoints}"]
    listed = subprocess.run(
        [*command, "--job=gpt", "--json"],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert [each["step"] for each in json.loads(listed.stdout) if each.get("pinned")] == pinned
    assert browser.complaints() == []


def test_ranks_advance_and_the_page_fails_over_when_its_replica_is_killed(
    local: LocalCluster, browser: Browser
) -> None:
    browser.open(f"http://{local.coordinators[0].http}/jobs/gpt")
    says(browser, "of 100,000")
    says(browser, "train/loss")
    browser.run("window.mark = 'still here'")
    first = browser.run(STEP)
    browser.wait("a later step", lambda: bool(browser.run(STEP) > first))
    says(browser, "live from coordinator-1")
    time.sleep(2)  # the scripts of the other pages are prefetched meanwhile
    before = browser.run(STEP)
    local.coordinators[0].child.kill()
    began = time.monotonic()
    browser.wait("another replica", lambda: "live from coordinator-" in browser.text() and "coordinator-1" not in browser.text())  # fmt: skip
    browser.wait("a later step", lambda: bool(browser.run(STEP) > before))
    assert time.monotonic() - began < FAILOVER_S
    assert browser.run("return window.mark") == "still here"
    click(browser, "Ranks")
    says(browser, "Who holds it up?")
    says(browser, "step")
    assert get(local, "/jobs/gpt/ranks", 1)["relative_score"] != [None, None]
    local.coordinators[0].restart()


def test_a_plain_page_needs_no_javascript(local: LocalCluster, chromedriver: str, tmp_path: Path) -> None:
    with browsing(chromedriver, tmp_path, "--blink-settings=scriptEnabled=false") as browser:
        browser.open(f"http://{local.coordinators[1].http}/status")
        assert "coordinator-2" in browser.text()
        assert "gpt" in browser.text()
        assert browser.run("return document.querySelectorAll('meta[http-equiv=refresh]').length") == 1
        browser.open(f"http://{local.coordinators[1].http}/")
        assert "/status says the same without" in browser.text()
