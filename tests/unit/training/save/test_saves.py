"""The coordinated saves of a run: when they are due, the payloads that ranks exchange, and the cost."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.save.handle import CheckpointInfo
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.health.goodput import GOODPUT_KEY, STEP, Ledger
from strata.core.health.reported import REPORTED_KEY
from strata.core.kv.records import CheckpointType
from strata.errors import BarrierTimeout, Unavailable
from strata.training.loop.clock import Clock
from strata.training.rank_context import Alone
from strata.training.save.cadence import FIRST_STEPS, Pace, Rule, payload_of
from strata.training.save.saves import BUFFER_WAIT_S, Saves
from strata.training.save.state import OWN_KEY, Position


class Time:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> Clock:
        return Clock(
            monotonic_s=lambda: self.now_s, unix_s=lambda: 1e9 + self.now_s, thread_s=lambda: self.now_s
        )


class Pair(Alone):
    """Rank 0 and a slower rank 1, whose payload is `other`."""

    def __init__(self, *, other: bytes, arrive: Callable[[], None] = lambda: None) -> None:
        super().__init__(world_size=1)
        self.other = other
        self.arrive = arrive
        self.reported: list[bytes] = []

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        self.reported.append(payload or b"")
        self.arrive()
        return {0: payload or b"", 1: self.other}


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointManager:
    monkeypatch.delenv("STRATA_SOCKET", raising=False)
    return CheckpointManager(tmp_path)


def saves(
    context: Alone, manager: CheckpointManager, time: Time, rule: Rule | None = None
) -> tuple[Saves, Ledger]:
    ledger = Ledger(since_s=time.now_s)
    made = Saves(
        context,
        manager,
        rule=rule or Rule(),
        wait_s=1.0,
        clock=time.clock(),
        ledger=ledger,
        position=Position(),
        saved={},
    )
    return made, ledger


def test_the_next_save_is_planned_by_the_slowest_rank(manager: CheckpointManager) -> None:
    time, state = Time(), dict[str, Any]()
    context = Pair(other=payload_of(Pace(step_s=2.0, save_s=3.0)))
    made, ledger = saves(context, manager, time, Rule(every_s=60))
    assert next(step for step in range(1, 15) if made.due(step)) == FIRST_STEPS
    ledger.enter(STEP, time.now_s)
    time.now_s += 5.0  # half a second a step
    info = made.save(state, Position(step=10), {"loader": {"seed": 1}}, patient=True).wait(20)
    assert json.loads(context.reported[0])["step_s"] == 0.5
    assert made.plan.interval == 30
    assert state[OWN_KEY]["loader"] == {"seed": 1}
    assert (state[OWN_KEY]["step"], state[OWN_KEY]["pace"]["step_s"]) == (10, 2.0)
    assert json.loads(info.metadata[GOODPUT_KEY])["spent_s"][STEP] == 5.0
    assert not made.due(39)
    assert made.due(40)
    manager.close()


def test_the_cost_of_a_save_excludes_the_time_until_the_next_save(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer may evaluate for long between two saves.

    If this time counted, no grace would seem long enough for a save.
    """
    time, state, copied = Time(), dict[str, Any](), threading.Event()

    def arrive() -> None:
        time.now_s += 0.25  # the wait for the other rank

    def written(info: CheckpointInfo) -> None:
        assert copied.wait(20)
        time.now_s = 4.25

    save_state = manager.save_state
    monkeypatch.setattr(
        manager, "save_state", lambda state, **more: save_state(state, progress=written, **more)
    )
    context = Pair(other=payload_of(Pace()), arrive=arrive)
    made, ledger = saves(context, manager, time)
    ledger.enter(STEP, 0.0)
    info = made.save(state, Position(step=1), {}, patient=True)
    copied.set()
    assert info.wait(20).committed
    time.now_s += 600.0
    assert made.expected_s() == pytest.approx(4.0), "the copy and the commit, once all are there"
    made.save(state, Position(step=2), {}, patient=True)
    payload = json.loads(context.reported[1])
    assert (payload["save_s"], payload["commit_s"]) == (0.25, 4.0)
    manager.close()


@pytest.mark.parametrize("value", [1.5, math.nan, math.inf])
def test_reported_numbers_are_saved_if_they_are_finite(manager: CheckpointManager, value: float) -> None:
    made, _ = saves(Pair(other=payload_of(Pace(step_s=1.0))), manager, Time(), Rule(every_s=60))
    made._reported = lambda: {"loss": value, "lr": 0.1}
    info = made.save({}, Position(step=10), {}, patient=True).wait(20)
    expected = {"loss": value, "lr": 0.1} if math.isfinite(value) else {"lr": 0.1}
    assert json.loads(info.metadata[REPORTED_KEY]) == expected


def test_a_rank_that_is_late_is_waited_for(manager: CheckpointManager) -> None:
    rounds = iter([True, True, False])

    def arrive() -> None:
        if next(rounds):
            raise BarrierTimeout("1 of 2 arrived", missing=[])

    context = Pair(other=payload_of(Pace()), arrive=arrive)
    made, _ = saves(context, manager, Time())
    made.save({}, Position(step=1), {}, patient=True)
    assert len(context.reported) == 3
    rounds = iter([True])
    with pytest.raises(BarrierTimeout):
        made.save({}, Position(step=2), {}, patient=False)
    manager.close()


def test_only_a_due_save_needs_the_coordinators(
    manager: CheckpointManager,
) -> None:
    def arrive() -> None:
        raise Unavailable("no outcome within 1 s")

    context = Pair(other=payload_of(Pace()), arrive=arrive)
    made, _ = saves(context, manager, Time(), Rule(every_steps=5))
    assert [made.due(step) for step in range(1, 6)] == [False] * 4 + [True]
    assert context.reported == []
    with pytest.raises(Unavailable):
        made.save({}, Position(step=5), {}, patient=True)
    assert made.saved_step == 0
    manager.close()


@pytest.mark.parametrize(
    ("full_every", "types"),
    [(1, ["full"] * 4), (3, ["full", "incremental", "incremental", "full"]), (0, ["incremental"] * 4)],
)
def test_full_and_incremental_saves_follow_full_every(
    full_every: int, types: list[str], manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_notice: list[CheckpointType] = []
    save_state = manager.save_state

    def noted(state: Any, **more: Any) -> Any:
        on_notice.append(more["checkpoint_type"])
        return save_state(state, **more)

    monkeypatch.setattr(manager, "save_state", noted)
    made, _ = saves(Alone(world_size=1), manager, Time(), Rule(full_every=full_every))
    written = [
        made.save({"weights": bytes(64)}, Position(step=step), {}, patient=True).wait(20).checkpoint_type
        for step in range(1, 5)
    ]
    assert [one.value for one in on_notice] == types
    assert written[0] is CheckpointType.FULL, "there was nothing yet that another could build on"
    manager.close()


# -- while a save is held ---------------------------------------------------------------------


def held_elsewhere(**more: Any) -> bytes:
    return payload_of(Pace(step_s=1.0), held="disk full on host b", **more)


def test_no_rank_saves_while_one_holds_an_earlier_save(manager: CheckpointManager) -> None:
    time, state, context = Time(), dict[str, Any](), Pair(other=held_elsewhere())
    made, _ = saves(context, manager, time, Rule(every_steps=10))
    assert made.save_unless_held(state, Position(step=10), {}, patient=True) is None
    assert (made.plan.step, made.saved_step, OWN_KEY in state) == (20, 0, False)
    context.other = payload_of(Pace(step_s=1.0))
    info = made.save_unless_held(state, Position(step=20), {}, patient=True)
    assert info is not None
    info.wait(20)
    manager.close()
    assert manager.all_steps() == [20]


@pytest.mark.parametrize("who", ["here", "there"])
def test_all_ranks_save_if_one_is_at_its_end_despite_a_held_save(
    manager: CheckpointManager, who: str
) -> None:
    context = Pair(other=held_elsewhere() if who == "here" else held_elsewhere(must=True))
    made, _ = saves(context, manager, Time())
    if who == "here":
        info: CheckpointInfo | None = made.save({}, Position(step=10), {}, patient=True)
        assert json.loads(context.reported[0])["must"]
    else:
        info = made.save_unless_held({}, Position(step=10), {}, patient=True)
    assert info is not None
    info.wait(20)
    manager.close()


def test_a_rank_past_its_deadline_drops_its_held_saves(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drop the save in progress, the queued saves, and a save that still waits for a buffer."""

    def fails(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fails)
    made, _ = saves(Pair(other=payload_of(Pace())), manager, Time())
    state = {"w": np.zeros(3)}
    infos = [made.save(dict(state), Position(step=step), {}, patient=True) for step in (10, 20)]
    while manager.holds.current is None:
        assert not infos[0].done
    made.out_of_time = lambda: True
    infos.append(made.save(dict(state), Position(step=30), {}, patient=True))
    made.finish(30)
    assert [info.dropped for info in infos] == [True] * 3
    assert "step 30 was given up while the storage refused it" in made.lost
    manager.close()  # none of the saves counts as failed
    assert manager.all_steps() == []


def test_a_save_that_is_committed_as_its_wait_ends_is_no_error(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = saves(Pair(other=payload_of(Pace())), manager, Time())
    info = made.save({}, Position(step=10), {}, patient=True)
    waits, waited = [Unavailable("not done")], info.wait

    def wait(timeout_s: float) -> CheckpointInfo:
        waited(20)
        if waits:
            raise waits.pop()
        return info

    monkeypatch.setattr(info, "wait", wait)
    made.wait_ended(info)
    manager.close()


def test_a_rank_reports_the_reason_for_holding_a_save(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test replaces the wait for a buffer, which is `Holds.wait_for_buffer`."""
    limits: list[float] = []

    def wait_for_buffer(limit_s: float) -> str:
        limits.append(limit_s)
        return "disk full on host a"

    monkeypatch.setattr(manager.holds, "wait_for_buffer", wait_for_buffer)
    context = Pair(other=payload_of(Pace()))
    made, _ = saves(context, manager, Time())
    for step in (10, 20):
        assert made.save_unless_held({}, Position(step=step), {}, patient=True) is None
    assert [json.loads(payload)["held"] for payload in context.reported] == ["disk full on host a"] * 2
    assert limits == [BUFFER_WAIT_S, 0.0], "only the first time it waits for the saves in flight"
    manager.close()
