"""Ranks that train, each with a `Stopper`, in a room."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from strata.client.checkpoints import CheckpointManager
from strata.core.agreement import MARGIN_STEPS
from strata.core.reshaping import SAVED_BARRIER
from strata.training.stopping import AGREE_BARRIER, Stopper
from tests.unit.training.making import make_run
from tests.unit.training.room import LIMIT_S, Room, RoomRank

LENGTH = b'{"v":1,"batches":1}'
"""What a rank tells of a loader of one batch."""


class Trainer(threading.Thread):
    """One rank: a run with its own storage, which trains until its data or the world ends."""

    def __init__(
        self,
        room: Room,
        number: int,
        folder: Path,
        *,
        steps: int = 10**6,
        cost_s: float = 0.0,
        before_step: Callable[[int], None] = lambda step: None,
        save_every_steps: int = 0,
        word_s: float = LIMIT_S,
        closes: bool = False,
    ) -> None:
        super().__init__(daemon=True, name=f"rank {number}")
        self.peers: RoomRank = room.rank(number)
        self.folder = folder / str(number)
        self.run_ = make_run(
            self.peers,
            self.folder,
            state={"strata": {}, "weights": np.zeros(4)},
            wait_s=LIMIT_S,
            save_every_steps=save_every_steps or 10**9,
        )
        self.clock_s = 0.0
        self.overs = 0
        self.stopper = Stopper(
            self.run_,
            clock=lambda: self.clock_s + (time.monotonic() if word_s < LIMIT_S else 0.0),
            save_cost_s=lambda: cost_s,
            over=self._over,
            word_s=word_s,
        )
        self.run_.hooks.append(self.stopper)
        self._steps = steps
        self._closes = closes
        self._before_step = before_step
        self.ended_by: BaseException | None = None

    def _over(self) -> None:
        self.overs += 1

    def run(self) -> None:
        try:
            for number in range(self._steps):
                for _ in self.run_.steps([number], epoch=number):
                    self._before_step(number + 1)
            if self._closes:
                self.run_.close()
            self.run_.abandon("the data has ended", code=0)
        except BaseException as error:  # noqa: BLE001  # looked at by the test
            self.ended_by = error

    def saved(self) -> list[int]:
        return CheckpointManager(self.folder).all_steps()


def joined(trainers: list[Trainer]) -> list[Trainer]:
    for trainer in trainers:
        trainer.join(LIMIT_S)
        assert not trainer.is_alive(), f"{trainer.name} is stuck at step {trainer.run_.step}"
    return trainers


def training(room: Room, folder: Path, **options: Any) -> tuple[list[Trainer], threading.Barrier]:
    """Start all ranks, which meet in every step as in a collective; `met` counts the steps."""
    met = threading.Barrier(room.size)

    def collective(step: int) -> None:
        met.wait(LIMIT_S)

    trainers = [Trainer(room, n, folder, before_step=collective, **options) for n in range(room.size)]
    for trainer in trainers:
        trainer.start()
    return trainers, met


def saved_together(room: Room) -> bool:
    """Tell, once they have, that all ranks said that they saved."""
    with room.changed:
        return room.changed.wait_for(
            lambda: len(room.rounds.get((SAVED_BARRIER, 1), {})) == room.size, LIMIT_S
        )


def others_agree(room: Room, number: int) -> None:
    """Play a rank that says "ok" to the first step that is proposed."""
    other = room.rank(number)
    told = other.barrier(AGREE_BARRIER, b'{"v":1,"attempt":1,"begun":0}')
    step = max(json.loads(data)["begun"] for data in told.values()) + MARGIN_STEPS
    other.barrier(AGREE_BARRIER, json.dumps({"v": 1, "attempt": 1, "step": step, "ok": True}).encode())
