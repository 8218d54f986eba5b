"""Ranks of one world as threads of one process: `strata.training.rank_context.RankContext` without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from strata.errors import BarrierBroken, BarrierTimeout, StaleGeneration, StrataError, Unavailable
from strata.v1.members_pb2 import TrainingReport
from strata.v1.session_pb2 import RankPlace, WorldUpdate
from strata.v1.worlds_pb2 import JOB_PHASE_RUNNING, StopAction, StopNotice, World

LIMIT_S = 20.0


class Room:
    """A world of `size` ranks. Its barriers are released, time out and break as real barriers do."""

    def __init__(self, size: int, *, generation: int = 1) -> None:
        self.size = size
        self.generation = generation
        self.newest = generation
        self.changed = threading.Condition()
        self.rounds: dict[tuple[str, int], dict[int, bytes]] = {}
        self.over: set[tuple[str, int]] = set()
        """Rounds that timed out. Ranks that arrive later get a timeout too."""
        self.lost: set[int] = set()
        self.observers: dict[int, list[Callable[[WorldUpdate], None]]] = {}
        self.end_observers: list[Callable[[StrataError], None]] = []
        self.deaf: set[int] = set()
        """Ranks that receive no notice until `hear` delivers one."""

    def rank(self, number: int) -> RoomRank:
        return RoomRank(self, number)

    def notice(
        self, action: StopAction.ValueType, *, grace_s: float = 30.0, workers: Sequence[str] = ()
    ) -> StopNotice:
        """Send a stop notice to the world; every rank receives it, except the deaf ones."""
        notice = StopNotice(
            generation=self.generation,
            action=action,
            reason="a test asks",
            worker_ids=workers,
            grace_ms=round(1000 * grace_s),
        )
        for number in range(self.size):
            if number not in self.deaf:
                self.hear(number, notice)
        return notice

    def hear(self, number: int, notice: StopNotice) -> None:
        world = World(generation=self.generation, size=self.size, members=self.size)
        for callback in self.observers.get(number, []):
            callback(WorldUpdate(world=world, phase=JOB_PHASE_RUNNING, notice=notice))

    def next_world(self) -> None:
        """End the generation: publish the next world to every rank."""
        with self.changed:
            self.newest += 1
            self.changed.notify_all()
        world = World(generation=self.newest, size=self.size, members=self.size)
        for callbacks in self.observers.values():
            for callback in callbacks:
                callback(WorldUpdate(world=world, phase=JOB_PHASE_RUNNING))

    def leave(self, number: int) -> None:
        with self.changed:
            self.lost.add(number)
            self.changed.notify_all()


class RoomRank:
    """One rank of a `Room`."""

    job = "j"
    is_standalone = False
    detect_s = 0.0

    def __init__(self, room: Room, number: int) -> None:
        self._room = room
        self.rank = number
        self.worker_id = f"w{number}"
        self.generation = room.generation
        self.world_size = room.size
        self.phases: list[str] = []
        self.left: tuple[int, str] | None = None
        self.place: Callable[[RankPlace], None] = lambda place: None
        self._rounds: dict[str, int] = {}

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        room = self._room
        size = room.size if ranks is None else len(ranks)
        number = self._rounds[name] = self._rounds.get(name, 0) + 1
        with room.changed:
            here = room.rounds.setdefault((name, number), {})
            if (name, number) not in room.over:
                here[self.rank] = payload or b""
            room.changed.notify_all()

            def ended() -> bool:
                over = (name, number) in room.over or bool(room.lost - here.keys())
                return len(here) >= size or self._stale or over

            in_time = room.changed.wait_for(ended, LIMIT_S if timeout_s is None else timeout_s)
            if len(here) >= size:
                return {rank: data for rank, data in here.items() if data}
            self._check()
            if (name, number) in room.over:
                in_time = False
            if not in_time:
                room.over.add((name, number))
                room.changed.notify_all()
            missing = [f"rank {rank}" for rank in range(room.size) if rank not in here]
            raise (BarrierBroken if in_time else BarrierTimeout)(
                f"{name}: missing {missing}", missing=missing
            )

    def progress(
        self,
        step: int,
        phase: str = "",
        *,
        own_s: float | None = None,
        data_wait_s: float | None = None,
        training: Callable[[], TrainingReport] | None = None,
    ) -> None:
        self._check()
        self.phases.append(phase)

    def support_graceful_stop(self) -> None:
        pass

    def observe_world(self, callback: Callable[[WorldUpdate], None]) -> Callable[[], None]:
        self._room.observers.setdefault(self.rank, []).append(callback)
        return lambda: self._room.observers[self.rank].remove(callback)

    def observe_place(self, callback: Callable[[RankPlace], None]) -> Callable[[], None]:
        self.place = callback
        return lambda: None

    def observe_end(self, callback: Callable[[StrataError], None]) -> Callable[[], None]:
        self._room.end_observers.append(callback)
        return lambda: self._room.end_observers.remove(callback)

    def check(self) -> None:
        self._check()

    def call(self, request: Message, *, timeout_s: float = 0.0) -> Any:
        raise Unavailable("a room has no coordinators")

    def close(self, *, code: int = 0, reason: str = "") -> None:
        self.left = (code, reason)
        self._room.leave(self.rank)

    @property
    def _stale(self) -> bool:
        return self._room.newest > self.generation

    def _check(self) -> None:
        if self._stale:
            raise StaleGeneration(f"the world is generation {self._room.newest}")
