"""A killed coordinator stays in every status view until an operator forgets it or it returns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from strata.cli.console.exits import Exit
from strata.devcluster.local_cluster import LocalCluster, LocalCoordinator
from tests.cluster_fixtures import StartCluster, run_strata
from tests.integration.http.test_http import fetch, scrape
from tests.processes import LIMIT_S

Findings = dict[str, dict[str, Any]]
Status = dict[str, dict[str, Any]]


def until(what: Callable[[], bool], since: float) -> float:
    """Return the seconds from `since` until `what` held."""
    while not what():
        assert time.monotonic() - since < LIMIT_S, "it never was"
        time.sleep(0.1)  # polls other processes
    return time.monotonic() - since


def status(endpoints: str) -> Status:
    code, output = run_strata("status", "--json", "--endpoints", endpoints)
    assert code == 0, output
    return {each["replica"]: each for each in json.loads(output)["replicas"]}


def doctor(endpoints: str, ready: str) -> Findings:
    """Return the findings once the finding about coordinators ends with `ready`; a busy machine may delay a replica."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        _code, output = run_strata("doctor", "--json", "--timeout-s", "5", "--endpoints", endpoints)
        findings = {finding["what"]: finding for finding in json.loads(output)}
        if findings["coordinators"]["says"].endswith(ready):
            return findings
        assert time.monotonic() < deadline, findings


def kill(local: LocalCluster) -> tuple[LocalCoordinator, LocalCoordinator, float]:
    """Kill the leader; return the killed leader, a remaining coordinator, and the time of the kill."""
    name = local.status().leader
    lost = next(each for each in local.coordinators if each.name == name)
    stays = next(each for each in local.coordinators if each is not lost)
    lost.child.kill()
    lost.child.join()
    return lost, stays, time.monotonic()


@pytest.mark.slow
def test_a_killed_coordinator_is_shown_as_unreachable_and_later_forgotten(
    start_cluster: StartCluster, record_property: Callable[[str, object], None]
) -> None:
    local = start_cluster(coordinators=3)
    lost, stays, at = kill(local)
    where = ("--endpoints", stays.address)
    shown_s = until(lambda: status(stays.address)[lost.name]["unreachable_since_unix_ms"] > 0, at)
    record_property("shown_s", shown_s)
    found = status(stays.address)
    assert len(found) == 3
    assert (found[lost.name]["ready"], found[lost.name]["address"]) == (False, lost.address)

    code, text = run_strata("status", *where)
    assert code == 0
    assert f"{lost.name} unreachable for " in text
    assert max(map(len, text.splitlines())) <= 80, text
    findings = doctor(local.endpoints, "; 2 of 3 ready")
    assert findings["coordinators"]["level"] == "WARN"
    assert findings["coordinators"]["says"].startswith(f"{lost.name} unreachable for ")
    assert findings["coordinators"]["commands"] == [f"strata coordinators forget {lost.name}"]
    assert findings[f"coordinator {lost.address}"]["level"] == "WARN"
    assert "endpoints" not in findings
    samples = scrape(stays.http)
    labels = frozenset({("replica", lost.name)})
    assert samples["strata_replica_ready", labels] == 0
    assert 0 < samples["strata_replica_unreachable_seconds", labels] < LIMIT_S
    _code, page = fetch(stays.http, "/status")
    assert f"{lost.name} unreachable; 2 of 3 coordinators ready" in page

    code, output = run_strata("coordinators", "forget", stays.name, *where)
    assert code == Exit.REFUSED
    assert f"coordinator {stays.name} runs at {stays.address}" in output
    assert run_strata("coordinators", "forget", "nobody", *where)[0] == Exit.REFUSED
    assert run_strata("coordinators", "forget", lost.name, *where)[0] == 0
    assert lost.name not in status(stays.address)
    _code, text = run_strata("coordinators", "list", *where)
    assert "unreachable" not in text

    lost.restart()
    lost.wait_ready(LIMIT_S)
    lost.child.stop()  # a clean shutdown counts as a loss too
    at = time.monotonic()
    until(lambda: status(stays.address).get(lost.name, {}).get("unreachable", False), at)


@pytest.mark.slow
def test_doctor_compares_the_endpoints_with_the_coordinators(start_cluster: StartCluster) -> None:
    local = start_cluster(coordinators=2)
    here, other = local.coordinators
    nobody = "127.0.0.1:1"
    findings = doctor(f"{here.address},{nobody}", "2 of 2 ready")
    assert findings["endpoints"]["level"] == "WARN"
    assert findings["endpoints"]["says"] == f"{other.name} ({other.address}): not among --endpoints"
    assert "no coordinator is known at this address" in findings[f"coordinator {nobody}"]["says"]
