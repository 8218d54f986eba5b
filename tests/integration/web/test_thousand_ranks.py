"""A job of 1,000 ranks: the page needs little CPU, and its user never waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.browser import Browser, browsing
from tests.integration.web.conftest import Replicas

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(180)]

Record = Callable[[str, object], None]

MOST_ROWS = 80
LONGEST_TASK_MS = 50
FIRST_ROWS_MS = 1000
ATTEMPTS = 10
"""Loading and tasks are measured in wall-clock time. Other processes lengthen it, so the fastest attempt counts."""
WATCHED_S = 10
MOST_OF_A_CORE = 0.10

WATCH = """
new MutationObserver((_, observer) => {
  if (document.querySelector("[data-index]")) { window.firstRows = performance.now(); observer.disconnect(); }
}).observe(document, { childList: true, subtree: true });
window.longest = 0;
new PerformanceObserver((tasks) => {
  for (const task of tasks.getEntries()) window.longest = Math.max(window.longest, task.duration);
}).observe({ type: "longtask" });
"""
SCROLL = """
const table = document.querySelector('[role=table]');
const rows = () => table.querySelectorAll('[data-index]').length;
return new Promise((resolve) => {
  let most = 0, frame = 0;
  const step = () => {
    table.scrollTop += 250;
    most = Math.max(most, rows());
    if (++frame < 90 && table.scrollTop + table.clientHeight < table.scrollHeight) requestAnimationFrame(step);
    else resolve([most, table.scrollTop]);
  };
  requestAnimationFrame(step);
});
"""


@pytest.fixture
def browser(chromedriver: str, tmp_path: Path) -> Iterator[Browser]:
    with browsing(chromedriver, tmp_path, "--window-size=1440,900") as found:
        yield found


@pytest.fixture
def page(operator: Replicas, browser: Browser) -> Browser:
    operator.get("/jobs/llama-70b/heatmap")  # the fixture computes its numbers at the first request
    browser.open(operator.origins[0])
    browser.devtools("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    browser.open(f"{operator.origins[0]}/jobs/llama-70b/ranks")
    browser.wait("the ranks", lambda: bool(browser.run("return window.firstRows")))
    return browser


def test_the_first_rows_come_within_a_second(page: Browser, record_property: Record) -> None:
    took = [page.run("return window.firstRows")]
    while min(took) > FIRST_ROWS_MS and len(took) < ATTEMPTS:
        page.open(page.run("return location.href"))
        page.wait("the ranks", lambda: bool(page.run("return window.firstRows")))
        took.append(page.run("return window.firstRows"))
    record_property("first_rows_ms", took)
    assert min(took) <= FIRST_ROWS_MS


def test_the_table_scrolls_with_few_rows_and_without_long_tasks(
    page: Browser, record_property: Record
) -> None:
    page.wait("the page", lambda: page.run("return performance.now()") > 3000)
    longest: list[float] = []
    while not longest or (min(longest) > LONGEST_TASK_MS and len(longest) < ATTEMPTS):
        page.run("document.querySelector('[role=table]').scrollTop = 0; window.longest = 0")
        most, scrolled = page.run(SCROLL)
        assert scrolled > 20_000
        assert 0 < most <= MOST_ROWS
        time.sleep(2)  # two updates of the stream
        longest.append(page.run("return window.longest"))
    record_property("longest_task_ms", longest)
    assert min(longest) <= LONGEST_TASK_MS


def test_the_measure_sees_a_long_task(page: Browser) -> None:
    page.run("setTimeout(() => { const end = performance.now() + 400; while (performance.now() < end); })")
    page.wait("the task", lambda: page.run("return window.longest") > 350)


def test_a_second_of_changes_costs_a_tenth_of_a_core_at_most(page: Browser, record_property: Record) -> None:
    page.devtools("Performance.enable", timeDomain="threadTicks")  # CPU time of the page's thread alone
    page.wait("the page", lambda: page.run("return performance.now()") > 3000)
    before, began = _busy_s(page), time.monotonic()
    time.sleep(WATCHED_S)
    share = (_busy_s(page) - before) / (time.monotonic() - began)
    record_property("share_of_a_core", share)
    assert share <= MOST_OF_A_CORE


def _busy_s(page: Browser) -> float:
    metrics = {each["name"]: each["value"] for each in page.devtools("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])
