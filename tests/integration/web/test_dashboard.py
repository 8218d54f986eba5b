"""The dashboard in a real browser against the replicas of `web.fixture`: its contents, and its failover."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from tests.e2e.browser import Browser
from tests.integration.web.conftest import Replicas, StartReplicas
from tests.integration.web.pages import click, press

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

FAILOVER_S = 3.0
SILENT_FAILOVER_S = 6.0
"""The page leaves a silent replica after three seconds; a busy machine takes some more."""

Says = Callable[[str], None]

FETCHED = "return performance.getEntriesByType('resource').map((each) => each.name).join()"
STEP = "return Number(document.querySelector('dd span').textContent.replaceAll(',', ''))"


def test_the_missing_rank_of_a_stuck_barrier_is_two_clicks_away(
    operator: Replicas, browser: Browser, says: Says
) -> None:
    browser.open(operator.origins[0])
    says("vision-ft")
    click(browser, "vision-ft")
    says("has waited")
    assert "for rank 5: 7 of 8 have arrived" in browser.text(), "the first click says it already"
    click(browser, "Look at barriers")
    says("Rank 5 is missing")
    assert "node-002" in browser.text()
    assert browser.complaints() == []


def test_a_page_moves_without_being_loaded_again(operator: Replicas, browser: Browser, says: Says) -> None:
    browser.open(f"{operator.origins[0]}/jobs/gpt")
    says("of 200,000")
    browser.run("window.mark = 'still here'")
    first = browser.run(STEP)
    browser.wait("a later step", lambda: bool(browser.run(STEP) > first + 2))
    browser.wait(
        "the charts", lambda: browser.run("return document.querySelectorAll('.uplot canvas').length") >= 5
    )
    assert browser.run("return window.mark") == "still here"
    assert browser.complaints() == [], "its own policy refuses nothing of it"


@pytest.mark.parametrize(
    ("end", "limit_s"), [(signal.SIGKILL, FAILOVER_S), (signal.SIGSTOP, SILENT_FAILOVER_S)]
)
def test_a_page_fails_over_when_its_replica_ends(
    start_replicas: StartReplicas,
    browser: Browser,
    says: Says,
    end: signal.Signals,
    limit_s: float,
    record_property: Callable[[str, object], None],
) -> None:
    three = start_replicas()
    browser.open(f"{three.origins[0]}/jobs/gpt")
    says("live from r1")
    says("of 200,000")
    browser.run("window.mark = 'still here'")
    browser.wait("the scripts of all pages", lambda: "/heatmap-" in browser.run(FETCHED))
    before = browser.run(STEP)
    three.processes[0].send_signal(end)
    began = time.monotonic()
    browser.wait("another replica", lambda: "live from r2" in browser.text())
    browser.wait("a later step", lambda: bool(browser.run(STEP) > before))
    took = time.monotonic() - began
    record_property("took_s", took)
    assert took < limit_s
    assert browser.run("return window.mark") == "still here"
    click(browser, "Ranks")
    says("Who holds it up?")  # the browser loaded this page's script while its replica still ran
    three.processes[1].send_signal(signal.SIGKILL)
    browser.wait("the third", lambda: "live from r3" in browser.text())
    three.processes[2].send_signal(signal.SIGKILL)
    browser.wait("the truth", lambda: "no replica answers" in browser.text())
    browser.wait("the age of what it shows", lambda: "data is" in browser.text())
    three.processes[0].send_signal(signal.SIGKILL)


def test_an_operator_pins_a_checkpoint_and_every_replica_shows_it(
    start_replicas: StartReplicas, browser: Browser, says: Says
) -> None:
    three = start_replicas()
    path = "/jobs/gpt/checkpoints"
    found = [each for each in three.get(path)["checkpoints"] if each["state"] == "committed"]
    pinned = next(each for each in found if not (each["latest"] or each["references"] or each["tags"]))
    browser.open(f"{three.origins[0]}{path}")
    step = f"{pinned['step']:,}"
    click(browser, f"Pin checkpoint of step {step}")
    says("Retention keeps it until it is unpinned.")
    assert not _pinned(three, pinned["step"]), "nothing is done before it is confirmed"
    browser.run("document.querySelector('dialog button[type=submit]').click()")
    browser.wait("the answer", lambda: not browser.run("return !!document.querySelector('dialog')"))
    browser.wait(
        "the mark", lambda: "pinned" in browser.run("return document.querySelector('tbody').innerText")
    )
    assert _pinned(three, pinned["step"])
    click(browser, f"Delete checkpoint of step {step}")
    says("The coordinators refuse this as long as it is pinned.")
    browser.run("document.querySelector('dialog button[type=submit]').click()")
    says("is pinned: unpin it first")


@pytest.mark.slow
def test_an_unanswered_action_is_shown_as_unknown_and_later_as_done(
    start_replicas: StartReplicas, browser: Browser, says: Says
) -> None:
    three = start_replicas("--act-after", "8")
    path = "/jobs/gpt/checkpoints"
    pinned = next(each for each in three.get(path)["checkpoints"] if each["state"] == "committed")
    browser.open(f"{three.origins[0]}{path}")
    click(browser, f"Pin checkpoint of step {pinned['step']:,}")
    browser.run("document.querySelector('dialog button[type=submit]').click()")
    says("The outcome is not known yet")
    assert not _pinned(three, pinned["step"])
    says("It is pinned now.")
    assert _pinned(three, pinned["step"])
    assert "not known" not in browser.text()
    assert browser.run("return document.querySelectorAll('dialog button').length") == 1, "nothing to confirm"
    click(browser, "Close")


def _pinned(three: Replicas, step: int) -> bool:
    found = three.get("/jobs/gpt/checkpoints", replica=2)["checkpoints"]
    return any(each["step"] == step and each["pinned"] for each in found)


def test_a_viewer_has_no_button_and_is_refused(
    start_replicas: StartReplicas, browser: Browser, says: Says
) -> None:
    three = start_replicas("--role", "viewer")
    browser.open(f"{three.origins[0]}/jobs/gpt/checkpoints")
    says("Used by")
    says("ada · viewer")
    labels = browser.run("return [...document.querySelectorAll('tbody button')].length")
    assert labels == 0
    step = three.get("/jobs/gpt/checkpoints")["checkpoints"][0]["step"]
    request = urllib.request.Request(
        f"{three.origins[0]}/api/v1/jobs/gpt/checkpoints/{step}/pin",
        data=json.dumps({}).encode(),
        headers={"X-Strata-Action": "1"},
    )
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request)


def test_the_page_requests_a_token_once_and_sends_it_to_no_other_port(
    start_replicas: StartReplicas, browser: Browser, says: Says
) -> None:
    three = start_replicas("--token", "sesame")
    browser.open(f"{three.origins[0]}/jobs/gpt")
    says("This cluster requires a sign-in")
    browser.run("document.querySelector('input[type=password]').focus()")
    browser.devtools("Input.insertText", text="wrong")
    press(browser, "Enter")
    says("this cluster wants a token")
    browser.run("document.querySelector('input[type=password]').select()")
    browser.devtools("Input.insertText", text="sesame")
    press(browser, "Enter")
    says("of 200,000")
    says("live from r1")
    assert "sesame" not in browser.run(
        "return performance.getEntriesByType('resource').map(e => e.name).join()"
    )
    three.processes[0].send_signal(signal.SIGKILL)
    says("no replica answers")


def test_a_viewer_without_a_token_signs_in_to_operate_and_out_again(
    start_replicas: StartReplicas, browser: Browser, says: Says
) -> None:
    three = start_replicas("--token", "sesame", "--loopback")
    browser.open(f"{three.origins[0]}/jobs/gpt/checkpoints")
    says("Used by")
    buttons = "return document.querySelectorAll('tbody button').length"
    assert browser.run(buttons) == 0
    click(browser, "Sign in")
    says("Every user of this host may read.")
    browser.devtools("Input.insertText", text="wrong")  # the input field has the focus
    press(browser, "Enter")
    says("this cluster wants a token")
    click(browser, "Go on without")
    says("Used by")
    click(browser, "Sign in")
    says("Every user of this host may read.")
    browser.devtools("Input.insertText", text="sesame")
    press(browser, "Enter")
    browser.wait("the buttons", lambda: browser.run(buttons) > 0)
    says("ada · operator")
    click(browser, "Sign out")
    says("Sign in")
    browser.wait("no button", lambda: "Used by" in browser.text() and browser.run(buttons) == 0)
    click(browser, "Ranks")
    says("Who holds it up?")
    assert "watch=%2Fme" not in browser.run(FETCHED), "the stream has no such path"


def test_a_cluster_without_authentication_offers_no_sign_in(
    operator: Replicas, browser: Browser, says: Says
) -> None:
    browser.open(f"{operator.origins[0]}/jobs/gpt")
    says("of 200,000")
    says("live from r1")
    assert "Sign in" not in browser.text()
    assert "Sign out" not in browser.text()


def test_the_ranks_that_findings_name_come_first_and_are_marked(
    operator: Replicas, browser: Browser, says: Says
) -> None:
    rows = "return [...document.querySelectorAll('.virtual-row')].map((row) => row.innerText.split('\\n').join('|'))"
    for job, rank, finding in (("gpt", 11, "slow (thermal)"), ("vision-ft", 5, "stalled (loader)")):
        browser.open(f"{operator.origins[0]}/jobs/{job}/ranks")
        says(f"Rank {rank}: {finding}")
        browser.wait("rows", lambda: bool(browser.run(rows)))
        found = browser.run(rows)
        assert found[0].startswith(f"{rank}|{finding}|"), found[0]
        named = set(operator.get(f"/jobs/{job}")["findings"][0]["ranks"])
        assert sum("(" in row.split("|")[1] for row in found) >= len(named)
        assert browser.run("return document.querySelectorAll('.score.warn').length") == 2 * (job == "gpt")


def test_the_table_of_ranks_is_used_with_the_keyboard(
    operator: Replicas, browser: Browser, says: Says
) -> None:
    browser.open(f"{operator.origins[0]}/jobs/llama-70b/ranks")
    says("Rank 417")
    rows = "return !!document.querySelector('[role=row][tabindex=\"0\"]')"
    browser.wait("rows", lambda: browser.run(rows))
    # sort by rank, whose order is stable, not by score; a link named "Ranks" precedes the column, hence the selector
    browser.run("document.querySelector('[role=columnheader] button').click()")
    by_rank = "return document.querySelector('[role=row][tabindex=\"0\"]')?.textContent.startsWith('0')"
    browser.wait("the order of the ranks", lambda: browser.run(by_rank))
    browser.run("document.querySelector('[role=row][tabindex=\"0\"]').focus()")
    press(browser, "End")
    row = "return document.activeElement.getAttribute('aria-rowindex')"
    browser.wait("the last row", lambda: browser.run(row) == "1001")
    press(browser, "Home")
    browser.wait("the first row", lambda: browser.run(row) == "2")
    press(browser, "ArrowDown")
    browser.wait("the second row", lambda: browser.run(row) == "3")
    press(browser, "Enter")
    says("What is it doing?")
    press(browser, "Escape")
    browser.wait("the drawer's end", lambda: "What is it doing?" not in browser.text())
    browser.wait("the row again", lambda: browser.run(row) is not None)


def test_a_search_and_a_phase_find_jobs_and_stay_in_the_address(
    operator: Replicas, browser: Browser, says: Says
) -> None:
    browser.open(f"{operator.origins[0]}/?phase=failed")
    says("rank 2 raised CudaError")
    assert "ablation" not in browser.text()
    browser.open(f"{operator.origins[0]}/")
    says("ablation-01")
    browser.run("document.querySelector('input[type=search]').focus()")
    browser.devtools("Input.insertText", text="llama")
    browser.wait("what matches", lambda: "ablation-01" not in browser.text())
    assert browser.run("return location.search") == "?q=llama"
    assert "llama-70b" in browser.text()
