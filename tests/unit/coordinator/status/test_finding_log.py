"""The leader's log of findings."""

from __future__ import annotations

from typing import Any, cast

from structlog.testing import capture_logs

from strata.coordinator.context import ReplicaContext
from strata.coordinator.status.diagnosis import LiveReports
from strata.coordinator.status.finding_log import MAX_LOGGED, FindingLog
from strata.core.health.findings import Finding


def finding(rank: int, text: str = "it is slow", since_ms: int = 0) -> Finding:
    return Finding(kind="slow", text=text, ranks=(rank,), host="a", cause="compute", since_ms=since_ms)


def made() -> FindingLog:
    return FindingLog(cast("ReplicaContext", None), cast("LiveReports", None))  # `note` needs no replica


def events(logs: list[Any]) -> list[tuple[str, str, str]]:
    return [(line["event"], line["job"], line["ranks"]) for line in logs]


def test_a_finding_is_logged_when_it_begins_and_when_it_is_over() -> None:
    log = made()
    with capture_logs() as logs:
        log.note("j", [finding(3)], 10.0)
        log.note("j", [finding(3, "it is slow for 5 s", since_ms=5000)], 15.0)
        log.note("k", [finding(3)], 15.0)
        log.note("j", [finding(4)], 22.5)
        log.note("j", [], 30.0)
    assert events(logs) == [
        ("finding", "j", "3"),
        ("finding", "k", "3"),
        ("finding", "j", "4"),
        ("finding_over", "j", "3"),
        ("finding_over", "j", "4"),
    ]
    assert (logs[0]["text"], logs[0]["cause"], logs[0]["host"]) == ("it is slow", "compute", "a")
    assert logs[3]["lasted_s"] == 12.5


def test_the_number_of_logged_findings_is_bounded() -> None:
    log = made()
    with capture_logs() as logs:
        log.note("j", [finding(rank) for rank in range(2 * MAX_LOGGED)], 1.0)
        log.note("k", [finding(0)], 1.0)
    assert len(logs) == MAX_LOGGED
