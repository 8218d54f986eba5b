"""The findings of `strata doctor` about the coordinators' clocks, and about an etcd whose revision went back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strata.cli.checks.coordinators import (
    ClockReading,
    clock_findings,
    is_suspended,
    read_clock,
    suspended,
)
from strata.cli.etcd.remedies import UNKNOWN, Connection
from strata.core.kv.records import ClusterUid
from strata.core.restore.lineage import THE_WAY_BACK, replacement

CONNECTION = Connection(endpoints=("127.0.0.1:1",))
UID = "064f5378a6ab428ca5ea1122815c3079"


def reading(offset_s: float, error_s: float = 0.01, replica: str = "c1") -> ClockReading:
    return ClockReading(replica=replica, offset_s=offset_s, error_s=error_s)


@pytest.mark.parametrize(
    ("offsets", "level", "printed"),
    [
        ([], "", ""),
        ([0.0], "OK", "at most 0.010 s"),
        ([0.9, -0.9, 0.0], "OK", "at most 0.910 s"),
        ([2.0], "WARN", "a replica's clock or this host's is off"),
        ([-2.0, 0.0], "WARN", "a replica's clock or this host's is off"),
        ([0.0, -30.0, 0.0], "WARN", "1 of 3 replicas' clocks are off"),
        ([-30.0, -30.0, -30.0], "WARN", "this host's clock is off"),
        ([5.0, 5.0, 0.0], "WARN", "this host's clock is off"),
    ],
)
def test_clocks_are_judged_by_how_far_they_are_apart(offsets: list[float], level: str, printed: str) -> None:
    found = list(clock_findings([reading(offset) for offset in offsets]))
    assert [finding.level for finding in found] == ([level] if level else [])
    for finding in found:
        assert printed in finding.says
        assert finding.commands == (
            ("timedatectl set-ntp true", "chronyc makestep") if level == "WARN" else ()
        )


def test_a_clock_difference_within_the_round_trip_error_is_accepted() -> None:
    (finding,) = clock_findings([reading(2.0, error_s=1.5)])
    assert finding.level == "OK"
    (finding,) = clock_findings([reading(2.0, error_s=0.5)])
    assert finding.level == "WARN"
    assert "+2.000 s ± 0.500 s (c1)" in finding.says


def clocked(
    times: list[float], answers: list[int]
) -> tuple[Callable[[], dict[str, Any]], Callable[[], float]]:
    """Return a replica that gives these clock readings in turn, and a clock of this host that gives `times`."""
    return (lambda: {"answered_by": "c2", "unix_ms": answers.pop(0)}), (lambda: times.pop(0))


def test_the_fastest_answer_sets_the_clock_offset_and_half_its_round_trip_the_error() -> None:
    ask, now = clocked([10.0, 14.0, 20.0, 20.2, 30.0, 31.0], [15_000, 23_100, 33_000])
    found = read_clock(ask, now)
    assert found.replica == "c2"
    assert found.offset_s == pytest.approx(3.0)
    assert found.error_s == pytest.approx(0.101)


IN_PLACE = ("strata controlplane restore --in-place --storage ROOT --etcd 127.0.0.1:1",)
FROM = (
    "strata controlplane restore --from PLACE --storage ROOT --etcd 127.0.0.1:1",
    "strata controlplane rebuild --storage ROOT --etcd 127.0.0.1:1",
)


@pytest.mark.parametrize(
    ("found", "at", "restoring", "commands", "hint"),
    [
        (None, 9, "", FROM, "the first command that applies"),
        (ClusterUid(uid=UID), 5, "", IN_PLACE, "the first command that applies"),
        (ClusterUid(uid="f" * 32), 9, "", FROM, "the first command that applies"),
        (ClusterUid(uid=UID), 9, "ada@h1 began", FROM, "takes it over"),
        (ClusterUid(uid=UID), 9, "ada@h1 began, from storage", FROM[1:], "takes it over"),
        (ClusterUid(uid=UID), 9, "ada@h1 began, from the backup of today", FROM[:1], "takes it over"),
        (ClusterUid(uid=UID), 9, "ada@h1 began, from etcd as of revision 7", IN_PLACE, "takes it over"),
    ],
)
@pytest.mark.parametrize(
    "end", ["", f"; the way back: {THE_WAY_BACK}", "; etcd was restored or replaced at 12:00: x"]
)
def test_a_suspended_replica_is_a_failure_with_the_commands_that_repair_it(
    found: ClusterUid | None, at: int, restoring: str, commands: tuple[str, ...], hint: str, end: str
) -> None:
    why = replacement(uid=UID, revision=9, found=found, at_revision=at, restoring=restoring)
    message = f"no coordinator answered within 3 s: etcd was restored or replaced at 11:59:58: {why}{end}"
    assert is_suspended(message)
    finding = suspended("coordinators", message, CONNECTION, ())
    assert finding.level == "FAIL"
    assert finding.says == f"etcd was restored or replaced at 11:59:58: {why}"
    assert finding.commands == commands
    assert hint in finding.hint


def test_a_replica_that_is_away_is_not_taken_for_a_suspended_one() -> None:
    assert not is_suspended("no coordinator answered within 3 s: connection refused")


def test_a_host_that_does_not_reach_etcd_leaves_its_endpoints_to_the_operator() -> None:
    finding = suspended(
        "coordinators", "etcd was restored or replaced at 12:00: etcd has lost its data", UNKNOWN, ("/a",)
    )
    assert finding.commands[0] == "strata controlplane restore --from PLACE --storage /a --etcd ETCD"
