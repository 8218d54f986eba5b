"""A replica's health from its timings: when it sends members to other replicas, and when it deletes none."""

from __future__ import annotations

import pytest

from strata.core.leadership.replica_health import SPARE_S, TURN_S, Diagnosis


def made(*, turned_s: float = 100.0) -> Diagnosis:
    return Diagnosis(turned_s=turned_s)


@pytest.fixture
def diagnosis() -> Diagnosis:
    return made()


@pytest.mark.parametrize(
    ("now_s", "silence_s", "ready"),
    [
        (100.0, 0.0, True),
        (100.0, 2.0, True),
        (100.0, 2.1, False),
        (100.0 + TURN_S + 1.0, 0.0, True),
        (100.0 + TURN_S + 1.1, 0.0, False),
    ],
)
def test_etcd_silence_or_a_late_event_loop_makes_a_replica_unready(
    diagnosis: Diagnosis, now_s: float, silence_s: float, ready: bool
) -> None:
    why = diagnosis.unready(now_s, etcd_silence_s=silence_s)
    assert (why == "") is ready
    assert (diagnosis.spares_s(now_s, etcd_silence_s=silence_s) == 0) is ready


@pytest.mark.parametrize(
    ("now_s", "silence_s", "peer_silence_s", "away"),
    [
        (100.0, 0.0, 0.0, False),
        (100.0, 1.9, 0.0, False),
        (100.0, 2.1, 0.5, True),
        (100.0, 2.1, 0.7, False),
        (100.0, 30.0, 29.0, False),
        (102.0, 0.0, 0.5, True),
        (102.0, 3.0, 2.0, False),
    ],
    ids=["well", "not yet", "forsaken", "gone for all?", "gone for all", "stalled", "stalled, gone for all?"],
)
def test_members_are_redirected_only_if_another_replica_is_better_off(
    now_s: float, silence_s: float, peer_silence_s: float, away: bool
) -> None:
    better = made().better_off(now_s, etcd_silence_s=silence_s, peer_silence_s=peer_silence_s)
    assert better is away


def test_a_stall_is_detected_by_the_first_check_and_counts_from_its_end(diagnosis: Diagnosis) -> None:
    assert diagnosis.spares_s(110.0, etcd_silence_s=0.0) == SPARE_S, "before the loop measured itself"
    diagnosis.turned(110.0, etcd_silence_s=0.0)
    assert diagnosis.unready(110.9, etcd_silence_s=0.0), "it has only just begun to turn again"
    diagnosis.turned(111.0, etcd_silence_s=0.0)
    assert not diagnosis.unready(111.0, etcd_silence_s=0.0)
    assert diagnosis.spares_s(114.0, etcd_silence_s=0.0) > 0


def test_event_loop_turns_in_time_keep_a_replica_ready(diagnosis: Diagnosis) -> None:
    for number in range(100):
        now_s = 100.0 + number * 1.2
        diagnosis.turned(now_s, etcd_silence_s=0.0)
        assert not diagnosis.unready(now_s, etcd_silence_s=0.0)
        assert diagnosis.spares_s(now_s, etcd_silence_s=0.0) == 0


def test_after_a_silence_of_etcd_no_member_is_removed_for_a_while(diagnosis: Diagnosis) -> None:
    diagnosis.turned(100.2, etcd_silence_s=3.0)
    assert not diagnosis.unready(100.3, etcd_silence_s=0.1), "it is ready at once"
    for at_s in (101.0, 102.0, 103.0, 104.0, 105.0):
        assert diagnosis.spares_s(at_s, etcd_silence_s=0.1) > 0
        diagnosis.turned(at_s, etcd_silence_s=0.1)
    assert diagnosis.spares_s(105.3, etcd_silence_s=0.1) == 0


@pytest.mark.parametrize(
    ("sessions", "lost", "spares"),
    [(5, 5, False), (6, 6, True), (30, 6, False), (30, 7, True), (100, 20, False), (100, 21, True)],
)
def test_many_sessions_broken_within_a_second_pause_removals(
    diagnosis: Diagnosis, sessions: int, lost: int, spares: bool
) -> None:
    for number in range(lost):
        diagnosis.lost(100.0 + 0.9 * number / lost, left=sessions - number - 1)
    assert (diagnosis.spares_s(100.9, etcd_silence_s=0.0) > 0) is spares


def test_sessions_broken_one_after_the_other_do_not_pause_removals(diagnosis: Diagnosis) -> None:
    for number in range(50):
        diagnosis.lost(100.0 + number * 0.2, left=3)
        diagnosis.turned(100.0 + number * 0.2, etcd_silence_s=0.0)
    assert diagnosis.spares_s(110.0, etcd_silence_s=0.0) == 0


def test_a_second_mass_of_lost_sessions_restarts_the_pause(diagnosis: Diagnosis) -> None:
    for at_s in (100.0, 103.0):
        diagnosis.turned(at_s, etcd_silence_s=0.0)
        for _ in range(6):
            diagnosis.lost(at_s, left=0)
    diagnosis.turned(104.0, etcd_silence_s=0.0)
    assert diagnosis.spares_s(104.0, etcd_silence_s=0.0) == pytest.approx(4.0)


def test_a_late_view_makes_a_replica_unready_and_pauses_removals(
    diagnosis: Diagnosis,
) -> None:
    assert not diagnosis.unready(100.0, etcd_silence_s=0.0, behind_s=1.9)
    assert "behind" in diagnosis.unready(100.0, etcd_silence_s=0.0, behind_s=2.1)
    assert diagnosis.better_off(100.0, etcd_silence_s=0.0, peer_silence_s=0.0, behind_s=2.1)
    assert diagnosis.spares_s(101.0, etcd_silence_s=0.0) == SPARE_S - 1
    assert not diagnosis.unready(100.2, etcd_silence_s=0.0)
