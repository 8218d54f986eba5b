"""Accessibility of every page: axe-core finds no serious violation, and the page fits a phone's width."""

from __future__ import annotations

import pytest

from tests.e2e.browser import Browser
from tests.integration.web.conftest import Replicas, StartReplicas
from tests.integration.web.pages import DESKTOP, PAGES, PHONE, click, complete, look, press

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
BAD = {"serious", "critical"}


def violations(browser: Browser, axe: str) -> list[list[str]]:
    """Return the serious violations that axe finds on the current page."""
    browser.run(axe)
    found: list[list[str]] = browser.run(
        f"return axe.run(document, {{runOnly: {RULES}}}).then((found) => found.violations.map("
        "({id, impact, nodes}) => [id, impact, nodes[0].html, nodes[0].failureSummary]))"
    )
    return [each for each in found if each[1] in BAD]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_serious_accessibility_violation_or_an_error(
    operator: Replicas, browser: Browser, axe: str, scheme: str
) -> None:
    found = []
    for path, text in PAGES.items():
        look(browser, DESKTOP, scheme)
        browser.open(operator.origins[0] + path)
        # resize the loaded page: to load it again takes longer than to check it
        for size in (DESKTOP, PHONE):
            look(browser, size, scheme)
            complete(browser, path, text)
            found += [(path, size, *each) for each in violations(browser, axe)]
            found += [(path, complaint) for complaint in browser.complaints() if "nobody" not in complaint]
    assert not found, "\n".join(map(str, found))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sign_in_and_dialogs_have_no_serious_accessibility_violation(
    start_replicas: StartReplicas, browser: Browser, axe: str, scheme: str
) -> None:
    origin = start_replicas("--token", "sesame", "--loopback", "--act-after", "7").origins[0]
    found = []
    for size in (DESKTOP, PHONE):
        look(browser, size, scheme)
        browser.open(f"{origin}/jobs/gpt/checkpoints")
        complete(browser, "signed out", "Sign in")
        complete(browser, "signed out", "Used by")
        found += violations(browser, axe)
        click(browser, "Sign in")
        complete(browser, "the form", "Every user of this host may read")
        found += violations(browser, axe)
        browser.devtools("Input.insertText", text="sesame")
        press(browser, "Enter")
        click(browser, "Delete checkpoint")
        complete(browser, "a dialog", "The coordinators refuse this")
        found += violations(browser, axe)
        click(browser, "Cancel")
        click(browser, "Pin checkpoint")
        press(browser, "Enter")
        for text in ("not known yet", "It is pinned now."):
            complete(browser, "an action without an answer", text)
            found += violations(browser, axe)
        click(browser, "Close")
        click(browser, "Sign out")
        wide = browser.run("return document.documentElement.scrollWidth")
        assert wide <= size[0]
    assert not found, "\n".join(map(str, found))


def test_the_checker_finds_a_planted_contrast_violation(
    operator: Replicas, browser: Browser, axe: str
) -> None:
    browser.open(operator.origins[0] + "/cluster")
    browser.wait("the page", lambda: "answers you" in browser.text())
    browser.run("document.querySelector('h1').style.color = '#999'")
    browser.run(axe)
    violations = browser.run(
        "return axe.run().then((found) => found.violations.map((each) => [each.id, each.impact]))"
    )
    assert ["color-contrast", "serious"] in violations


def test_no_page_is_wider_than_a_phone(operator: Replicas, browser: Browser) -> None:
    look(browser, PHONE, "light")
    for path, text in PAGES.items():
        browser.open(operator.origins[0] + path)
        complete(browser, path, text)
        wide = browser.run("return document.documentElement.scrollWidth")
        assert wide <= PHONE[0], path


def test_on_a_phone_running_jobs_come_first_and_a_table_that_is_cut_has_a_shade(
    operator: Replicas, browser: Browser
) -> None:
    look(browser, PHONE, "light")
    browser.open(operator.origins[0])
    browser.wait("the jobs", lambda: "ablation-01" in browser.text())
    text = browser.text()
    assert text.index("gpt") < text.index("ablation-01"), "what is done does not bury what runs"
    assert browser.run("return document.querySelector('table') === null"), (
        "jobs are cards, which do not scroll"
    )
    browser.open(operator.origins[0] + "/cluster")
    browser.wait("the page", lambda: "answers you" in browser.text())
    shade, wide, shown = browser.run(
        "const at = document.querySelector('[aria-label=Replicas]');"
        "return [getComputedStyle(at).backgroundImage, at.scrollWidth, at.clientWidth]"
    )
    assert wide > shown
    assert shade.count("linear-gradient") == 4


def test_the_switch_of_colours_beats_the_system(operator: Replicas, browser: Browser) -> None:
    look(browser, DESKTOP, "light")
    browser.open(operator.origins[0])
    browser.wait("the page", lambda: "ablation-01" in browser.text())
    ground = "return getComputedStyle(document.body).backgroundColor"
    assert browser.run(ground) == "rgb(255, 255, 255)"
    press_switch = "document.querySelector('button[aria-label^=Colours]').click()"
    browser.run(press_switch)
    browser.run(press_switch)
    browser.wait("the dark", lambda: browser.run(ground) != "rgb(255, 255, 255)")
    browser.open(operator.origins[0])
    assert browser.run(ground) != "rgb(255, 255, 255)", "it is remembered"
