from __future__ import annotations

import json
from pathlib import Path

from strata_chaos.judgement.log_errors import SUSPENDED, errors_in_logs


def log(folder: Path, name: str, *lines: str) -> None:
    (folder / f"{name}.log").write_text("\n".join(lines))


def event(name: str, level: str) -> str:
    return json.dumps({"event": name, "level": level, "keys": ["/strata/v1/default/leader"]})


def test_an_error_that_a_coordinator_logged_is_a_finding(tmp_path: Path) -> None:
    log(tmp_path, "coordinator-1", event("peer_link_down", "info"), event("watch_lost", "warning"))
    log(
        tmp_path,
        "coordinator-2",
        event("view_differs_from_etcd", "error"),
        event("view_differs_from_etcd", "error"),
        event("call_failed", "error"),
    )

    views, calls = errors_in_logs(tmp_path)

    assert views.checker == "logs"
    assert views.message == "coordinator-2 logged view_differs_from_etcd as an error, 2 times"
    assert views.evidence[0].startswith("coordinator-2.log:1: {")
    assert "call_failed" in calls.message


def test_a_bare_traceback_is_a_finding_and_a_torn_line_is_not(tmp_path: Path) -> None:
    log(tmp_path, "coordinator-1", "Traceback (most recent call last):", '{"event": "peer_link_d')
    log(tmp_path, "etcd-1", event("its own affair", "error"))

    (found,) = errors_in_logs(tmp_path)

    assert "a traceback" in found.message


def test_a_run_without_logs_has_no_findings(tmp_path: Path) -> None:
    assert errors_in_logs(tmp_path / "logs") == []


def test_errors_that_the_injected_faults_cause_are_no_finding(tmp_path: Path) -> None:
    log(tmp_path, "coordinator-1", event("replica_suspended", "error"), event("call_failed", "error"))

    (found,) = errors_in_logs(tmp_path, expected=SUSPENDED)

    assert "call_failed" in found.message
    assert len(errors_in_logs(tmp_path)) == 2
