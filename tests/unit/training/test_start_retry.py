"""`StartRetry`: a rank waits at its start while its storage refuses reads; when this wait ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from strata.checkpoint.save.retry import SaveRetry
from strata.client.checkpoints.manager import CheckpointManager
from strata.errors import Preempted, StaleGeneration, StorageError
from strata.training import start_retry
from strata.training.orchestrator import TrainingOrchestrator
from strata.training.rank_context import Alone
from strata.training.start_retry import StartRetry
from strata.v1.members_pb2 import TrainingReport
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import (
    STOP_ACTION_DRAIN,
    STOP_ACTION_PREEMPT,
    STOP_ACTION_SCALE,
    StopAction,
    StopJobRequest,
    StopJobResponse,
    StopNotice,
    World,
)
from tests.unit.checkpoint.ports import Cluster
from tests.unit.training.test_orchestrator import StandalonePort


class Waiting(StandalonePort):
    """A rank that records its reports, and receives the worlds of a test."""

    received: Callable[[WorldUpdate], None] | None = None
    supports = False

    def observe_world(self, callback: Callable[[WorldUpdate], None]) -> Callable[[], None]:
        self.received = callback
        return lambda: setattr(self, "received", None)

    def progress(
        self,
        step: int,
        phase: str = "",
        *,
        own_s: float | None = None,
        data_wait_s: float | None = None,
        training: Callable[[], TrainingReport] | None = None,
    ) -> None:
        self.__dict__.setdefault("phases", []).append(phase)
        super().progress(step, phase)

    def support_graceful_stop(self) -> None:
        self.supports = True

    def call(self, request: Message, *, timeout_s: float = 30.0) -> Any:
        if isinstance(request, StopJobRequest):
            assert self.supports, "otherwise the agent would end this process while it exits by itself"
            self.__dict__.setdefault("stops", []).append(request)
            return StopJobResponse()
        return super().call(request, timeout_s=timeout_s)

    def close(self, *, code: int = 0, reason: str = "") -> None:
        self.code = code
        super().close(code=code, reason=reason)

    def notice(self, action: StopAction.ValueType, *workers: str) -> None:
        world = World(generation=self.generation)
        notice = StopNotice(
            generation=self.generation, action=action, worker_ids=workers, reason="a test asks"
        )
        assert self.received is not None
        self.received(WorldUpdate(world=world, notice=notice))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_retry, "SaveRetry", partial(SaveRetry, pauses_s=(0.01,)))


@pytest.fixture
def rank() -> Waiting:
    cluster = Cluster(b=1)
    author = cluster.job.author(0)
    return Waiting(
        cluster=cluster,
        worker_id=author.worker,
        incarnation=author.incarnation,
        generation=author.generation,
        rank=0,
    )


@pytest.fixture
def orchestrator(tmp_path: Path, rank: Waiting, monkeypatch: pytest.MonkeyPatch) -> TrainingOrchestrator:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("STRATA_TRAIN_SAVE_GRACE_S", "20")
    made = TrainingOrchestrator("nowhere:1", storage_path=tmp_path, preempt_signals=())
    monkeypatch.setattr(made, "_join", lambda: rank)
    return made


def busy() -> StorageError:
    return StorageError("cannot read x: SlowDown", transient="storage answers 503")


class Refusing:
    """Refuse a call `times` times, and call `then` at each refusal."""

    def __init__(self, times: int, then: Callable[[], None] = lambda: None) -> None:
        self.times = times
        self.then = then

    def __call__(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.times:
            self.times -= 1
            self.then()
            raise busy()
        return act(*args, **kwargs)


@pytest.mark.parametrize("act", ["__init__", "restore", "texts_of_ranks"])
def test_a_rank_whose_storage_refuses_at_startup_waits_and_starts(
    act: str,
    orchestrator: TrainingOrchestrator,
    rank: Waiting,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = {"w": np.zeros(1)}
    with orchestrator.init(state=state) as first:
        first.step_done()
    rank.restore_point = rank.cluster.restore_point()
    done = getattr(CheckpointManager, act)
    refusing = Refusing(3)
    monkeypatch.setattr(CheckpointManager, act, lambda *args, **kwargs: refusing(done, *args, **kwargs))
    with orchestrator.init(state=state) as run:
        assert run.step == 1
        run.cursors()
        run.step_done()
    assert refusing.times == 0
    assert "restore: waits 0 s for storage" in rank.__dict__["phases"]
    holds = [hold and (hold.step, hold.reason) for hold in rank.holds]
    assert holds == [(2, "storage answers 503"), None], (
        "step 2 cannot be trained: such a generation does not count"
    )
    assert "no checkpoint since step 1, 0 s: storage answers 503" in caplog.text


def test_a_non_transient_error_at_startup_is_raised_at_once(
    orchestrator: TrainingOrchestrator, rank: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise StorageError("denied")

    monkeypatch.setattr(CheckpointManager, "restore", denied)
    with pytest.raises(StorageError, match="denied"):
        orchestrator.init(state={})
    assert rank.code == 1


def test_after_the_grace_all_ranks_are_stopped_and_the_rank_exits_with_75(
    orchestrator: TrainingOrchestrator, rank: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestrator.config = type(orchestrator.config)(
        storage=orchestrator.config.storage, save_grace_s=0.2, preempt_grace_s=7.0
    )
    monkeypatch.setattr(CheckpointManager, "restore", lambda *_, **__: Refusing(1)(lambda: None))
    with pytest.raises(Preempted, match="storage answers 503") as ended:
        orchestrator.init(state={})
    assert (ended.value.code, rank.code) == (75, 75)
    (request,) = rank.__dict__["stops"]
    assert (request.action, request.grace_ms, request.generation) == (
        STOP_ACTION_PREEMPT,
        7000,
        rank.generation,
    )
    assert "storage answers 503" in request.reason


def test_a_standalone_process_waits_and_exits_with_75_too() -> None:
    start = StartRetry(Alone(world_size=1), grace_s=0.2, preempt_grace_s=1.0)
    refusing = Refusing(2)
    assert start(lambda: refusing(lambda: 7)) == 7
    forever = Refusing(10**6)
    with pytest.raises(Preempted):
        start(lambda: forever(lambda: 7))


@pytest.mark.parametrize(
    ("action", "others", "leaves"),
    [
        (STOP_ACTION_PREEMPT, False, True),
        (STOP_ACTION_DRAIN, False, True),
        (STOP_ACTION_DRAIN, True, False),
        (STOP_ACTION_SCALE, False, False),
    ],
)
def test_a_rank_ends_its_wait_only_for_a_notice_to_leave(
    action: StopAction.ValueType,
    others: bool,
    leaves: bool,
    orchestrator: TrainingOrchestrator,
    rank: Waiting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing = Refusing(3, then=lambda: rank.notice(action, "other" if others else rank.worker_id))
    restore = CheckpointManager.restore
    monkeypatch.setattr(CheckpointManager, "restore", lambda *a, **k: refusing(restore, *a, **k))
    if not leaves:
        orchestrator.init(state={}).close()
        return
    with pytest.raises(Preempted, match="a test asks"):
        orchestrator.init(state={})
    assert (refusing.times, rank.code) == (2, 75)
    assert rank.received is None, "it listens no longer"


@pytest.mark.parametrize("armed", [False, True])
def test_the_end_of_its_generation_ends_the_wait(
    armed: bool, orchestrator: TrainingOrchestrator, rank: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standalone process continues in the next generation; other processes are ended by their agent."""
    refusing, tries = Refusing(1, then=rank.cluster.next_world), list[int]()
    claim = CheckpointManager.__init__

    def claimed(*args: Any, **kwargs: Any) -> None:
        tries.append(rank.generation)
        refusing(claim, *args, **kwargs)

    monkeypatch.setattr(CheckpointManager, "__init__", claimed)
    if armed:
        ending = orchestrator._ending_of

        def bound(context: Any) -> Any:
            made = ending(context)
            made.arm()
            monkeypatch.setattr(made, "over", lambda error: None)
            return made

        monkeypatch.setattr(orchestrator, "_ending_of", bound)
        with pytest.raises(StaleGeneration):
            orchestrator.init(state={})
        assert len(tries) == 1
        return
    with orchestrator.init(state={}) as run:
        assert run.world.generation == tries[1] > tries[0]
