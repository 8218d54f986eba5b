"""The etcd member that provides the snapshot, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.restore.backup_source import MAX_BEHIND, Candidate, choose_member

LEADER = Candidate(
    endpoint="h1:2379", member="etcd-1", leads=True, knows_leader=True, raft_index=10 * MAX_BEHIND
)
SECOND = replace(LEADER, endpoint="h2:2379", member="etcd-2", leads=False)
THIRD = replace(SECOND, endpoint="h3:2379", member="etcd-3")
SILENT = Candidate(endpoint="h2:2379", error="it does not answer")
FAR = LEADER.raft_index - MAX_BEHIND - 1


@pytest.mark.parametrize(
    ("candidates", "chosen", "printed"),
    [
        ([LEADER, SECOND, THIRD], "h2:2379", "etcd-2 is a healthy follower"),
        ([THIRD, SECOND, LEADER], "h2:2379", "etcd-2 is a healthy follower"),
        ([LEADER, replace(SECOND, raft_index=SECOND.raft_index - 1), THIRD], "h3:2379", "healthy follower"),
        ([LEADER, SILENT, THIRD], "h3:2379", "etcd-3 is a healthy follower"),
        ([LEADER, replace(SECOND, corrupt=True), THIRD], "h3:2379", "healthy follower"),
        ([LEADER, replace(SECOND, learner=True), THIRD], "h3:2379", "healthy follower"),
        ([LEADER, replace(SECOND, knows_leader=False), THIRD], "h3:2379", "healthy follower"),
        ([LEADER, replace(SECOND, raft_index=FAR), THIRD], "h3:2379", "healthy follower"),
        ([LEADER, replace(SECOND, raft_index=FAR + 1)], "h2:2379", "healthy follower"),
        ([LEADER], "h1:2379", "no other member was named"),
        ([LEADER, SILENT], "h1:2379", "no follower is healthy (h2:2379: it does not answer)"),
        ([LEADER, replace(SECOND, corrupt=True)], "h1:2379", "the alarm CORRUPT is on for it"),
        ([replace(LEADER, corrupt=True), SECOND], "h2:2379", "healthy follower"),
        # the leader is not among the endpoints: the reference is the newest member that is
        ([SECOND, replace(THIRD, raft_index=FAR)], "h2:2379", "healthy follower"),
    ],
)
def test_a_healthy_member_is_chosen(candidates: list[Candidate], chosen: str, printed: str) -> None:
    choice = choose_member(candidates)
    assert choice.endpoint == chosen
    assert printed in choice.reason


@pytest.mark.parametrize(
    ("candidates", "printed"),
    [
        ([], "no etcd endpoint is known"),
        ([SILENT], "h2:2379: it does not answer"),
        (
            [replace(SECOND, knows_leader=False), Candidate(endpoint="h1:2379", error="refused")],
            "h1:2379: refused; h2:2379: it knows no leader",
        ),
        ([replace(LEADER, corrupt=True)], "h1:2379: the alarm CORRUPT is on for it"),
        ([replace(LEADER, corrupt=True), replace(SECOND, learner=True)], "h2:2379: it is a learner"),
        (
            [replace(LEADER, corrupt=True), replace(SECOND, raft_index=FAR)],
            f"h2:2379: it is {MAX_BEHIND + 1} raft entries behind the leader",
        ),
    ],
)
def test_without_a_healthy_member_each_etcd_members_fault_is_reported(
    candidates: list[Candidate], printed: str
) -> None:
    choice = choose_member(candidates)
    assert choice.endpoint is None
    assert printed in choice.reason
