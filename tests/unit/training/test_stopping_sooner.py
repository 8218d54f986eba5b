"""A preemption with little time comes while a rank, for which there was much, waits before another world."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from strata.checkpoint.handle import CheckpointInfo
from strata.core.agreement import TimeLeft
from strata.core.reshaping import SAVED_BARRIER
from strata.errors import Preempted
from strata.training.alike import LOADER_BARRIER
from strata.training.stopping import SAVE_BARRIER
from strata.v1.worlds_pb2 import STOP_ACTION_PREEMPT, STOP_ACTION_RESHAPE
from tests.unit.training.room import LIMIT_S, Room
from tests.unit.training.trainers import LENGTH, Trainer, joined, others_agree

LONG_S = 10 * LIMIT_S


@pytest.mark.parametrize("where", [f"{SAVE_BARRIER}.1", SAVED_BARRIER])
def test_who_waits_for_the_others_leaves_within_the_shorter_time(where: str, tmp_path: Path) -> None:
    """Another rank never comes."""
    room = Room(2)
    trainer = Trainer(room, 0, tmp_path, word_s=LONG_S)
    room.notice(STOP_ACTION_RESHAPE, grace_s=LONG_S)
    others_agree(room, 1)
    dear = TimeLeft(left_ms=1000, cost_ms=2000).encode()
    comes = [(LOADER_BARRIER, LENGTH), (f"{SAVE_BARRIER}.1", dear)]
    for name, payload in comes if where == SAVED_BARRIER else comes[:1]:
        threading.Thread(target=room.rank(1).barrier, args=(name, payload), daemon=True).start()
    trainer.start()
    with room.changed:
        assert room.changed.wait_for(lambda: 0 in room.rounds.get((where, 1), {}), LIMIT_S)
    room.notice(STOP_ACTION_PREEMPT, grace_s=10.0)
    trainer.clock_s += 10.0
    joined([trainer])
    assert isinstance(trainer.ended_by, Preempted)
    assert trainer.peers.left == (75, "a test asks")


def test_who_waits_for_a_save_to_be_committed_leaves_within_the_shorter_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room(1)
    trainer = Trainer(room, 0, tmp_path, word_s=LONG_S)
    hangs, over = threading.Event(), threading.Event()

    def held(info: CheckpointInfo) -> None:
        hangs.set()
        over.wait()

    save_state = trainer.run_.checkpoints.save_state
    monkeypatch.setattr(
        trainer.run_.checkpoints, "save_state", lambda state, **more: save_state(state, progress=held, **more)
    )
    room.notice(STOP_ACTION_RESHAPE, grace_s=LONG_S)
    trainer.start()
    assert hangs.wait(LIMIT_S)
    room.notice(STOP_ACTION_PREEMPT, grace_s=10.0)
    trainer.clock_s += 10.0
    try:
        joined([trainer])
    finally:
        over.set()
    assert isinstance(trainer.ended_by, Preempted)
    assert "IS SKIPPED: waiting for the save" in caplog.text
