"""The guard against stale answers: which answers of etcd the client accepts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from strata.errors import ClusterReplaced, Unavailable
from strata.etcd.guard import Guard


@dataclass(frozen=True)
class Answer:
    revision: int
    raft_term: int = 3
    cluster_id: int = 7


def seen(*answers: Answer) -> Guard:
    guard = Guard()
    for answer in answers:
        guard.admit(answer, guard.floor, "e1", linearizable=True)
    return guard


@pytest.mark.parametrize("term", [1, 3, 9], ids=["a younger etcd", "as before", "an older etcd"])
@pytest.mark.parametrize("revision", [1, 99])
def test_a_linearizable_read_below_a_seen_revision_proves_etcd_data_loss(revision: int, term: int) -> None:
    guard = seen(Answer(100))
    with pytest.raises(ClusterReplaced, match=rf"is at revision {revision}, and was at 100"):
        guard.admit(Answer(revision, term), guard.floor, "e1", linearizable=True)
    assert (guard.revision, guard.term) == (100, 3), "nothing is learnt from it"


def test_the_minimum_revision_is_fixed_when_the_request_is_sent() -> None:
    guard = seen(Answer(100))
    sent = guard.floor
    guard.admit(Answer(101), sent, "e1", linearizable=True)
    guard.admit(Answer(100), sent, "e1", linearizable=True)  # a later answer overtook this answer
    assert guard.revision == 101


def test_a_member_that_lags_may_answer_a_stale_read_or_a_watch() -> None:
    guard = seen(Answer(100))
    guard.admit(Answer(80), guard.floor, "e2")
    assert guard.revision == 100


def test_a_watch_answer_raises_the_seen_revision() -> None:
    """A follower reads little, so it knows the revision mostly from its watch."""
    guard = seen(Answer(100))
    guard.admit(Answer(120), guard.floor, "e2")
    with pytest.raises(ClusterReplaced, match="is at revision 119, and was at 120"):
        guard.admit(Answer(119), guard.floor, "e1", linearizable=True)


def test_an_answer_of_an_older_raft_term_is_unavailable() -> None:
    guard = seen(Answer(100, raft_term=3))
    with pytest.raises(Unavailable, match="raft term 2, 3 was seen"):
        guard.admit(Answer(100, raft_term=2), guard.floor, "e2", linearizable=True)


def test_another_cluster_is_never_believed() -> None:
    guard = seen(Answer(100))
    with pytest.raises(ClusterReplaced, match="belongs to cluster 8, not 7"):
        guard.admit(Answer(200, cluster_id=8), guard.floor, "e1", linearizable=True)
