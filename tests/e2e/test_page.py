"""The status page in a real browser: it shows the cluster, and keeps showing it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.launch.local_cluster import LocalCluster
from strata.v1.worlds_pb2 import JobSpec
from tests.cluster_fixtures import StartCluster
from tests.conftest import need
from tests.e2e.browser import Browser, browsing

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def chromedriver() -> str:
    found = shutil.which("chromedriver") if shutil.which("chromium") else None
    need("browser", found is not None, "apt-get install chromium chromium-driver")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def local(start_cluster: StartCluster) -> LocalCluster:
    return start_cluster(coordinators=1)


@pytest.fixture
def browser(chromedriver: str, tmp_path: Path) -> Iterator[Browser]:
    with browsing(chromedriver, tmp_path, "--window-size=1280,900") as found:
        yield found


def test_it_shows_what_changes_without_being_loaded_again(local: LocalCluster, browser: Browser) -> None:
    url = f"http://{local.coordinators[0].http}/"
    browser.open(url)
    assert "No job yet" in browser.text()
    assert "coordinator-1" in browser.text()
    browser.run("window.mark = 'still here'")
    with CoordinatorClient.connect(local.endpoints, job="seen") as client:
        client.register(worker_id="w-1", spec=JobSpec(min_workers=2, max_workers=2))

        def says(text: str) -> bool:
            client.heartbeat(worker_id="w-1")
            return text in browser.text()

        browser.wait("the job", lambda: says("seen"))
        assert browser.run("return window.mark") == "still here"
        assert "1 of 2 members are here" in browser.text()
        browser.run("document.querySelector('a[href=\"/jobs/seen\"]').click()")
        browser.wait("the job's page", lambda: says("waits for 1 more of 2 members"))
        browser.wait("its member", lambda: says("w-1"))
        client.leave(worker_id="w-1")
    assert browser.complaints() == [], "its own policy refuses nothing of it"


def test_it_fits_a_phone_and_the_dark(local: LocalCluster, chromedriver: str, tmp_path: Path) -> None:
    flags = ("--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    with browsing(chromedriver, tmp_path, *flags) as browser:
        browser.open(f"http://{local.coordinators[0].http}/")
        wide, screen = browser.run("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= screen, "tables scroll by themselves, the page does not"
        ground = browser.run("return getComputedStyle(document.body).backgroundColor")
        red, green, blue = (int(part) for part in ground[len("rgb(") : -1].split(","))
        assert max(red, green, blue) < 64


def test_without_javascript_it_reads_the_same_and_reloads(
    local: LocalCluster, chromedriver: str, tmp_path: Path
) -> None:
    with browsing(chromedriver, tmp_path, "--blink-settings=scriptEnabled=false") as browser:
        browser.open(f"http://{local.coordinators[0].http}/")
        assert "coordinator-1" in browser.text()
        assert browser.run("return document.querySelectorAll('meta[http-equiv=refresh]').length") == 1


def test_it_says_when_the_replica_is_gone(start_cluster: StartCluster, browser: Browser) -> None:
    (replica,) = start_cluster(coordinators=1).coordinators
    browser.open(f"http://{replica.http}/")
    replica.child.kill()
    browser.wait("the notice", lambda: "This replica does not answer" in browser.text())
    assert "coordinator-1" in browser.text(), "what it said last stays"
    replica.restart()
    browser.wait("its return", lambda: "This replica does not answer" not in browser.text())
