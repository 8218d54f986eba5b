"""Ranks that train in a `Room`, each with a `Stopper`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from strata.client.checkpoints.manager import CheckpointManager
from strata.core.stop.last_step import STOP_BARRIER, Agreement
from strata.training.settings_agreement import LOADER_BARRIER
from strata.training.stop.stopper import Stopper
from tests.unit.training.making import make_run
from tests.unit.training.room import LIMIT_S, Room, RoomRank

LENGTH = b'{"v":2,"batches":1,"order":"loader default"}'
"""The payload of a rank whose loader has one batch."""


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
        closes: bool = False,
    ) -> None:
        super().__init__(daemon=True, name=f"rank {number}")
        self.context: RoomRank = room.rank(number)
        self.folder = folder / str(number)
        self.run_ = make_run(
            self.context,
            self.folder,
            state={"strata": {}, "weights": np.zeros(4)},
            wait_s=LIMIT_S,
            save_every_steps=save_every_steps or 10**9,
        )
        self.clock_s = 0.0
        self.overs = 0
        self.left_now = threading.Event()
        self.stopper = Stopper(
            self.run_,
            clock=lambda: self.clock_s,
            save_cost_s=lambda: cost_s,
            over=self._over,
            leave_now=self.left_now.set,
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
    """Start all ranks, which meet in every step as in a collective; return the ranks and the barrier of the steps."""
    met = threading.Barrier(room.size)

    def collective(step: int) -> None:
        met.wait(LIMIT_S)

    trainers = [Trainer(room, n, folder, before_step=collective, **options) for n in range(room.size)]
    for trainer in trainers:
        trainer.start()
    return trainers, met


def in_first_step(room: Room, folder: Path, **options: Any) -> tuple[Trainer, threading.Event]:
    """Start rank 0 of a room without the others; return it in its first step, and the event that ends the step."""
    room.rounds[LOADER_BARRIER, 1] = dict.fromkeys(range(1, room.size), LENGTH)
    begun, end = threading.Event(), threading.Event()

    def first(step: int) -> None:
        begun.set()
        assert end.wait(LIMIT_S)

    trainer = Trainer(room, 0, folder, before_step=first, **options)
    trainer.start()
    assert begun.wait(LIMIT_S)
    return trainer, end


def decided(trainer: Trainer) -> int:
    """Return the step to stop after, once this rank knows the decision."""
    stopper = trainer.stopper
    with stopper._changed:
        assert stopper._changed.wait_for(lambda: stopper._agreement.decision is not None, LIMIT_S)
    assert stopper._agreement.decision is not None
    return stopper._agreement.decision.step


def holding(trainer: Trainer) -> int:
    """Return the step at which this rank waits, once it waits."""
    stopper = trainer.stopper
    with stopper._changed:
        assert stopper._changed.wait_for(lambda: stopper._agreement.hold is not None, LIMIT_S)
    assert stopper._agreement.hold is not None
    return stopper._agreement.hold


def proposes(room: Room, number: int) -> tuple[RoomRank, Agreement, bytes]:
    """Play a rank before its first step, only in the proposals; return the rank, its agreement and its answer."""
    other, agreement = room.rank(number), Agreement()
    brought = other.barrier(STOP_BARRIER, agreement.propose())
    return other, *agreement.answer(brought, ranks=room.size)


def others_agree(room: Room, number: int) -> None:
    """Play a rank that answers "ok" to the first proposed step."""
    other, _, answer = proposes(room, number)
    other.barrier(STOP_BARRIER, answer)
