"""The output of `strata status` and `strata doctor` about lost coordinators, errors of etcd, and members."""

from __future__ import annotations

import pytest

from strata.cli.checks.coordinators import judged_readiness, left_out
from strata.cli.status import job_row, readiness, show_status
from strata.v1.admin_pb2 import EtcdStatus, GetStatusResponse, ReplicaStatus
from strata.v1.worlds_pb2 import Job

ERROR = (
    "etcd did not answer: failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.2:2379: Failed to connect"
    " to remote host: connect: Connection refused (111)"
)


def replica(number: int, *, why: str = "", unreachable: bool = False) -> ReplicaStatus:
    return ReplicaStatus(
        replica=f"coordinator-{number}",
        address=f"host{number}:50051",
        version="" if unreachable else "0.1.0",
        leader=number == 1,
        ready=not why,
        not_ready_reason=why,
        unreachable=unreachable,
    )


ONE_UNREACHABLE = (replica(1), replica(2, why="unreachable for 14 s", unreachable=True), replica(3))


def test_an_unreachable_coordinator_is_shown_in_and_below_the_table_in_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_status(GetStatusResponse(cluster="default", leader="coordinator-1", replicas=ONE_UNREACHABLE), ())
    text = capsys.readouterr().out
    assert "coordinator-2  host2:50051  -         no     -" in text
    assert "\ncoordinator-2 unreachable for 14 s; 2 of 3 ready\n" in text
    assert "strata coordinators forget coordinator-2\n" in text
    assert all(len(line) <= 80 for line in text.splitlines()), text


def test_every_unready_coordinator_is_named_with_its_reason() -> None:
    every = (*ONE_UNREACHABLE[:2], replica(3, why="it is stopping"))
    assert (
        readiness(every) == "coordinator-2 unreachable for 14 s; coordinator-3: it is stopping; 1 of 3 ready"
    )
    assert readiness(ONE_UNREACHABLE[:1]) == "1 of 1 ready"


def test_a_long_error_of_etcd_stands_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    sick = EtcdStatus(endpoint="10.0.0.2:2379", error=ERROR)
    show_status(GetStatusResponse(etcd=[EtcdStatus(endpoint="10.0.0.1:2379", healthy=True), sick]), ())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("10.0.0.2:2379 ")] == [
        ["10.0.0.2:2379", "member", "no", "-", "0", "B"]
    ]
    assert f"10.0.0.2:2379: {ERROR}" in lines


def test_members_count_standbys_once() -> None:
    assert "3 (1 standby)" in job_row(Job(name="gpt", workers=3, standbys=["node-2"]))
    assert 3 in job_row(Job(name="gpt", workers=3))


def test_doctor_names_the_command_that_forgets_an_unreachable_coordinator() -> None:
    found = judged_readiness(ONE_UNREACHABLE)
    assert (found.level, found.says) == ("WARN", "coordinator-2 unreachable for 14 s; 2 of 3 ready")
    assert "lost-coordinator.md" in found.hint
    assert found.commands == ("strata coordinators forget coordinator-2",)
    assert judged_readiness(ONE_UNREACHABLE[:1]).level == "OK"


def test_doctor_names_coordinators_that_no_endpoint_leads_to() -> None:
    (found,) = left_out(ONE_UNREACHABLE, {"coordinator-1"}, {"lb:50051"})
    assert found.says == "coordinator-3 (host3:50051): not among --endpoints"
    assert not [*left_out(ONE_UNREACHABLE, {"coordinator-1"}, {"host3:50051"})], (
        "it is named, and does not answer just now"
    )
    assert not [*left_out(ONE_UNREACHABLE, {"coordinator-1", "coordinator-3"}, {"lb:50051"})]
