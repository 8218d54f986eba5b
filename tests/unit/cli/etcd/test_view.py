"""The output of `strata etcd status` for healthy, unhealthy, full and corrupt clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.cli.etcd.remedies import Connection
from strata.cli.etcd.view import COLUMNS, ClusterState, alarm_values, as_values, notes, rows, short
from strata.core.leadership.etcd_quorum import Answer, Peer
from strata.errors import NotFound, Refused, StrataError, Unavailable
from strata.etcd import Alarm, Member, MemberStatus

ETCD = Connection(endpoints=("h1:2379", "h2:2379", "h3:2379"))
QUOTA_BYTES = 4 << 20


def state(silent: int = 0, alarms: tuple[Alarm, ...] = (), learner: bool = False) -> ClusterState:
    """Return three members: the first leads, those in `silent` do not answer, and the third may be a learner."""
    peers, members, statuses = [], {}, {}
    for number in (1, 2, 3):
        is_learner = learner and number == 3
        answers = number != silent
        peers.append(
            Peer(
                id=number,
                name=f"etcd-{number}",
                learner=is_learner,
                address=f"h{number}:2379",
                endpoint=f"h{number}:2379",
                answer=Answer(leader_id=1, raft_term=4) if answers else None,
                silence="" if answers else "connection refused",
                corrupt=any(alarm.member_id == number and alarm.kind == "CORRUPT" for alarm in alarms),
            )
        )
        members[number] = Member(
            id=number,
            name=f"etcd-{number}",
            peer_urls=(f"http://h{number}:2380",),
            client_urls=(f"http://h{number}:2379",),
            learner=is_learner,
        )
        if answers:
            statuses[number] = MemberStatus(
                endpoint=f"h{number}:2379",
                cluster_id=9,
                member_id=number,
                version="3.5.30",
                leader_id=1,
                raft_term=4,
                raft_index=100 - number,
                revision=40,
                db_bytes=1 << 20,
                db_bytes_in_use=1 << 19,
                learner=is_learner,
                errors=(),
            )
    return ClusterState(peers=tuple(peers), members=members, statuses=statuses, alarms=alarms)


def printed(found: ClusterState) -> list[str]:
    return [line for note in notes(found, ETCD) for line in (note.says, *note.commands)]


def test_a_row_shows_a_member_whole() -> None:
    table = rows(state(), quota_bytes=QUOTA_BYTES)
    assert table[0] == (
        "etcd-1", "h1:2379", "1", "3.5.30", "leader", "4", "99", "40", "512.0 KiB of 1.0 MiB, 25 %", "-",
    )  # fmt: skip
    assert table[2][COLUMNS.index("ROLE")] == "follower"
    assert table[2][COLUMNS.index("INDEX")] == "97 (-2)"


def test_a_member_that_does_not_answer_is_a_row_with_the_reason() -> None:
    found = state(silent=2)
    row = rows(found, quota_bytes=QUOTA_BYTES)[1]
    assert row == ("etcd-2", "h2:2379", "2", "-", "silent: connection refused", "-", "-", "-", "-", "-")
    assert printed(found) == [
        "2 of 3 voters healthy; 2 are needed: one more loss stops all writes",
        "etcd-2 does not answer at h2:2379; start it, or if its disk or its host is lost:",
        "strata etcd replace-member etcd-2 --etcd h1:2379,h2:2379,h3:2379",
    ]


def test_a_healthy_cluster_has_one_sentence() -> None:
    found = list(notes(state(), ETCD))
    assert [(note.says, note.wrong) for note in found] == [
        ("3 of 3 voters healthy; 2 are needed: 1 more may be lost", False)
    ]
    assert as_values(state(), found, quota_bytes=QUOTA_BYTES)["healthy"]


def test_no_space_leaves_the_voters_healthy_and_names_the_repair_commands() -> None:
    found = state(alarms=(Alarm(member_id=1, kind="NOSPACE"), Alarm(member_id=3, kind="NOSPACE")))
    assert printed(found) == [
        "3 of 3 voters healthy; 2 are needed: 1 more may be lost",
        "etcd takes no writes: its quota is used up (alarm NOSPACE of etcd-1, etcd-3); run in this order:",
        "strata etcd defrag --compact --etcd h1:2379,h2:2379,h3:2379",
        "strata etcd alarm --disarm --etcd h1:2379,h2:2379,h3:2379",
    ]
    assert rows(found, quota_bytes=QUOTA_BYTES)[0][-1] == "NOSPACE"


def test_a_corrupt_member_counts_as_lost_and_is_to_be_replaced() -> None:
    found = state(alarms=(Alarm(member_id=2, kind="CORRUPT"),))
    assert printed(found) == [
        "2 of 3 voters healthy; 2 are needed: one more loss stops all writes",
        "the data of etcd-2 differs from the others' (alarm CORRUPT); run in this order:",
        "strata etcd replace-member etcd-2 --etcd h1:2379,h2:2379,h3:2379",
        "strata etcd alarm --disarm --etcd h1:2379,h2:2379,h3:2379",
    ]
    values = as_values(found, list(notes(found, ETCD)), quota_bytes=QUOTA_BYTES)
    assert not values["healthy"]
    assert values["alarms"] == [{"member": "etcd-2", "id": "2", "alarm": "CORRUPT"}]


def test_the_alarm_of_a_replaced_member_is_only_to_be_disarmed() -> None:
    found = state(alarms=(Alarm(member_id=0xBEEF, kind="CORRUPT"),))
    assert printed(found)[-1] == "strata etcd alarm --disarm --etcd h1:2379,h2:2379,h3:2379"
    assert printed(found)[1].startswith("the data of beef differs")
    assert alarm_values(found)[0]["member"] == "beef"


def test_a_learner_is_shown_with_the_command_that_promotes_it() -> None:
    found = state(learner=True)
    assert rows(found, quota_bytes=QUOTA_BYTES)[2][COLUMNS.index("ROLE")] == "learner"
    assert printed(found)[1:] == [
        "etcd-3 is a learner, without a vote; this makes it a voter:",
        "strata etcd replace-member etcd-3 --etcd h1:2379,h2:2379,h3:2379",
    ]
    assert not any(note.wrong for note in notes(found, ETCD))


def test_a_learner_that_has_not_started_has_no_name_yet() -> None:
    found = state(learner=True)
    unstarted = replace(found.peers[2], name="", address="", endpoint="", answer=None)
    lines = printed(replace(found, peers=(*found.peers[:2], unstarted)))
    assert lines[1].startswith("a learner is not started yet at http://h3:2380;")
    assert lines[2].startswith("strata etcd replace-member NAME --peer-url http://h3:2380 --etcd ")


def test_an_endpoint_of_no_known_member_is_a_row() -> None:
    found = replace(state(), unmatched={"h9:2379": "connection refused"})
    row = rows(found, quota_bytes=QUOTA_BYTES)[-1]
    assert row[:5] == ("?", "h9:2379", "-", "-", "silent: connection refused")


def test_a_member_is_found_by_name_and_by_id() -> None:
    found = state()
    assert found.need("etcd-2").id == found.need("2").id == 2
    assert found.find("etcd-9") is None
    with pytest.raises(NotFound, match="etcd-9"):
        found.need("etcd-9")
    twins = replace(found, peers=(*found.peers[:2], replace(found.peers[2], name="etcd-2")))
    with pytest.raises(Refused, match="2 members are named etcd-2"):
        twins.find("etcd-2")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("etcd h:1: DEADLINE_EXCEEDED: Deadline Exceeded", "no answer in time"),
        ("etcd h:1: UNAVAILABLE: failed to connect: Connection refused", "connection refused"),
        ("etcd h:1: no", "no"),
        ("etcd h:1: " + "x" * 80, "x" * 49 + "…"),
    ],
)
def test_reasons_are_short(message: str, reason: str) -> None:
    error: StrataError = Unavailable(message)
    assert short(error, "h:1") == reason
