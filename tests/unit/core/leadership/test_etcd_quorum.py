"""etcd's quorum as a table: which members are healthy, may stall, may be removed, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.leadership.etcd_quorum import (
    Answer,
    Peer,
    findings,
    healthy_voters,
    leader_id,
    may_add,
    may_disarm_no_space,
    may_remove,
    may_stall,
    next_to_defragment,
    quorum,
    quorum_sentence,
    role,
    unhealthy_reason,
)

LEADER = 1
"""The id of the leading member in every cluster below."""


def cluster(kinds: str) -> list[Peer]:
    """Return members `m1`, `m2`, … of these kinds.

    `.` healthy, `x` silent, `l` learner, `?` without a given endpoint, `u` not started yet, `n` without
    a leader, `t` in an older term, `e` with an error, `c` corrupt.
    """
    return [_peer(number, kind) for number, kind in enumerate(kinds, 1)]


def _peer(number: int, kind: str) -> Peer:
    peer = Peer(
        id=number,
        name=f"m{number}",
        address=f"h{number}:2379",
        endpoint=f"h{number}:2379",
        answer=Answer(leader_id=LEADER, raft_term=7),
    )
    answer = peer.answer
    assert answer is not None
    match kind:
        case "x":
            return replace(peer, answer=None, silence="connection refused")
        case "l":
            return replace(peer, learner=True)
        case "?":
            return replace(peer, answer=None, endpoint="")
        case "u":
            return replace(peer, answer=None, endpoint="", name="", address="")
        case "n":
            return replace(peer, answer=replace(answer, leader_id=0))
        case "t":
            return replace(peer, answer=replace(answer, raft_term=6))
        case "e":
            return replace(peer, answer=replace(answer, errors=("disk on fire",)))
        case "c":
            return replace(peer, corrupt=True)
    assert kind == "."
    return peer


@pytest.mark.parametrize(("voters", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_quorum_is_more_than_half(voters: int, needed: int) -> None:
    assert quorum(voters) == needed


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        (".", "1 of 1 voters healthy; 1 is needed: its loss stops all writes"),
        ("..", "2 of 2 voters healthy; 2 are needed: one more loss stops all writes"),
        (".x", "1 of 2 voters healthy; 2 are needed: no write succeeds until 1 more is healthy"),
        ("...", "3 of 3 voters healthy; 2 are needed: 1 more may be lost"),
        ("..x", "2 of 3 voters healthy; 2 are needed: one more loss stops all writes"),
        ("..?", "2 of 3 voters healthy; 2 are needed: one more loss stops all writes"),
        ("..u", "2 of 3 voters healthy; 2 are needed: one more loss stops all writes"),
        ("..l", "2 of 2 voters healthy; 2 are needed: one more loss stops all writes"),
        (".....", "5 of 5 voters healthy; 3 are needed: 2 more may be lost"),
        (".xxxx", "1 of 5 voters healthy; 3 are needed: no write succeeds until 2 more are healthy"),
    ],
)
def test_the_sentence_on_the_quorum(kinds: str, sentence: str) -> None:
    assert quorum_sentence(cluster(kinds)) == sentence


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (".", ""),
        ("x", "does not answer at h2:2379"),
        ("?", "is unknown: add its endpoint h2:2379 to --etcd"),
        ("u", "has not started yet"),
        ("n", "knows no leader"),
        ("t", "is in raft term 6, others are in 7"),
        ("e", "disk on fire"),
        ("c", "raises the alarm CORRUPT: its data differs from the others'"),
    ],
)
def test_an_unhealthy_voter_has_its_reason(kind: str, reason: str) -> None:
    peers = cluster(f".{kind}.")
    assert unhealthy_reason(peers[1], peers) == reason
    label = "2" if kind == "u" else "m2"
    assert findings(peers) == ([f"{label} {reason}"] if reason else [])
    assert len(healthy_voters(peers)) == (2 if reason else 3)


def test_a_learner_is_no_voter() -> None:
    peers = cluster("..l")
    assert [peer.name for peer in healthy_voters(peers)] == ["m1", "m2"]
    assert findings([*cluster(".."), replace(peers[2], answer=None)]) == []


def test_roles() -> None:
    peers = cluster("..lx?u")
    assert [role(peer, peers) for peer in peers] == [
        "leader", "follower", "learner", "silent", "unknown", "silent",
    ]  # fmt: skip


def test_the_newest_term_names_the_leader() -> None:
    old = replace(_peer(2, "."), answer=Answer(leader_id=2, raft_term=6))
    assert leader_id([_peer(1, "."), old]) == 1
    assert leader_id(cluster("nn")) == 0
    assert findings(cluster("nn"))[0] == "etcd has no leader: nothing can be written"
    assert leader_id(cluster("xx")) == 0


@pytest.mark.parametrize(
    ("kinds", "member", "allowed"),
    [
        (".", 1, False),
        ("..", 1, False),
        ("...", 1, True),
        ("...", 3, True),
        ("..x", 1, False),
        ("..x", 3, True),
        ("..?", 1, False),
        ("..u", 1, False),
        ("..n", 1, False),
        ("..t", 1, False),
        ("..e", 1, False),
        ("..c", 1, False),
        ("..c", 3, True),
        ("...l", 1, True),
        ("..l", 1, False),
        ("..l", 3, True),
        ("..xl", 1, False),
        (".....", 1, True),
        ("....x", 1, True),
        ("...xx", 1, False),
    ],
)
def test_a_member_may_stall_only_if_a_healthy_quorum_remains(
    kinds: str, member: int, *, allowed: bool
) -> None:
    peers = cluster(kinds)
    judgement = may_stall(peers[member - 1], peers)
    assert judgement.allowed is allowed
    assert bool(judgement.reason) is not allowed


def test_a_single_member_cluster_stalls_only_on_request() -> None:
    (only,) = cluster(".")
    assert "all of etcd stalls" in may_stall(only, [only]).reason
    assert may_stall(only, [only], stall_all=True).allowed
    two = cluster("..")
    assert not may_stall(two[0], two, stall_all=True).allowed


def test_the_blocking_member_is_named() -> None:
    peers = cluster("..x")
    assert may_stall(peers[0], peers).reason == (
        "while m1 stalls, 1 of 3 voters would be healthy, and 2 are needed: m3 does not answer at h3:2379"
    )
    peers = cluster("..?")
    assert (
        "m3 is unknown: add its endpoint h3:2379 to --etcd"
        in may_remove(peers[1], peers, even_if_healthy=True).reason
    )


@pytest.mark.parametrize(
    ("kinds", "member", "even_if_healthy", "allowed"),
    [
        (".", 1, True, False),
        ("x", 1, False, False),
        (".x", 2, False, False),
        ("...", 3, False, False),
        ("...", 3, True, True),
        ("..x", 3, False, True),
        ("..u", 3, False, True),
        ("..c", 3, False, True),
        ("..?", 3, False, False),
        ("..?", 3, True, True),
        ("..x", 2, True, False),
        (".xx", 3, False, False),
        ("...l", 4, False, False),
        ("...l", 4, True, True),
        ("....x", 5, False, True),
        ("...xx", 5, False, True),
        ("..xxx", 5, False, False),
    ],
)
def test_a_member_is_removable_only_if_unhealthy_or_forced_and_quorum_remains(
    kinds: str, member: int, *, even_if_healthy: bool, allowed: bool
) -> None:
    peers = cluster(kinds)
    judgement = may_remove(peers[member - 1], peers, even_if_healthy=even_if_healthy)
    assert judgement.allowed is allowed, judgement.reason
    assert bool(judgement.reason) is not allowed


@pytest.mark.parametrize(
    ("kinds", "order"),
    [
        (".", "m1"),
        ("..", "m2 m1"),
        ("...", "m2 m3 m1"),
        (".x.", "m3 m1"),
        ("..l", "m2 m1"),
        (".?.u.", "m3 m5 m1"),
    ],
)
def test_followers_are_defragmented_first_and_the_leader_last(kinds: str, order: str) -> None:
    peers, done = cluster(kinds), list[Peer]()
    while (following := next_to_defragment(peers, [peer.id for peer in done])) is not None:
        done.append(following)
    assert " ".join(peer.name for peer in done) == order


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        ("..", ""),
        ("....", ""),
        ("...", "no member is named m9, and none is missing; the members are m1, m2, m3"),
        (
            ".x",
            "no member is named m9; the members are m1, m2; m2 does not answer at h2:2379",
        ),
    ],
)
def test_a_member_may_be_added_only_if_one_is_missing(kinds: str, reason: str) -> None:
    judgement = may_add("m9", cluster(kinds))
    assert (judgement.allowed, judgement.reason) == (not reason, reason)


@pytest.mark.parametrize(
    ("used", "reason"),
    [
        ({"m1": 10, "m2": 89}, ""),
        ({"m1": 10, "m2": 90}, "databases still take 90 % of the quota or more: m2 90 %"),
        ({"m1": 10, "m2": None}, "the size of the database of m2 is unknown: no answer"),
    ],
)
def test_the_no_space_alarm_is_disarmed_once_space_is_free(used: dict[str, int | None], reason: str) -> None:
    judgement = may_disarm_no_space(used, 100)
    assert (judgement.allowed, judgement.reason) == (not reason, reason)
