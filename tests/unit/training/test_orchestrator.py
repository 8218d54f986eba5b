"""`TrainingOrchestrator`: the world that a process joins, and the checkpoint that it restores in this world."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from strata.errors import (
    CheckpointError,
    ConfigError,
    Conflict,
    JobDone,
    Refused,
    StaleGeneration,
    StorageError,
    StrataError,
)
from strata.training.init import init
from strata.training.orchestrator import TrainingOrchestrator
from strata.v1.members_pb2 import TrainingReport
from strata.v1.session_pb2 import RankPlace, WorldUpdate
from strata.v1.worlds_pb2 import Generation, ListGenerationsRequest, ListGenerationsResponse, World
from tests.unit.checkpoint.ports import Cluster, Port


@dataclass
class StandalonePort(Port):
    """A standalone process with its own job. It executes the catalog's transactions, and its world may change."""

    is_standalone: bool = True
    detect_s: float = 0.0
    rejoined: int = 0
    ended: str = ""
    code: int = -1

    def check(self) -> None:
        newest = self.cluster.job.author(0).generation
        if newest > self.generation:
            raise StaleGeneration(f"the world is generation {newest}")

    def progress(
        self,
        step: int,
        phase: str = "",
        *,
        own_s: float | None = None,
        data_wait_s: float | None = None,
        training: Callable[[], TrainingReport] | None = None,
    ) -> None:
        self.check()

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        self.check()
        return {0: payload} if payload else {}

    def rejoin(self) -> None:
        author = self.cluster.job.author(0)
        self.incarnation, self.generation = author.incarnation, author.generation
        self.restore_point = self.cluster.restore_point()
        self.rejoined += 1

    def call(self, request: Message, *, timeout_s: float = 30.0) -> Any:
        if isinstance(request, ListGenerationsRequest):
            began = Generation(world=World(generation=self.generation), began_unix_ms=1)
            return ListGenerationsResponse(generations=[began])
        return super().call(request, timeout_s=timeout_s)

    def support_graceful_stop(self) -> None:
        pass

    def observe_world(self, callback: Callable[[WorldUpdate], None]) -> Callable[[], None]:
        return lambda: None  # no callback is called: it would end this test's process

    def observe_place(self, callback: Callable[[RankPlace], None]) -> Callable[[], None]:
        return lambda: None

    def observe_end(self, callback: Callable[[StrataError], None]) -> Callable[[], None]:
        return lambda: None

    def close(self, *, code: int = 0, reason: str = "") -> None:
        self.code, self.ended = code, reason


@pytest.fixture
def standalone() -> StandalonePort:
    cluster = Cluster(b=1)
    author = cluster.job.author(0)
    return StandalonePort(
        cluster=cluster,
        worker_id=author.worker,
        incarnation=author.incarnation,
        generation=author.generation,
        rank=0,
    )


@pytest.fixture
def orchestrator(
    tmp_path: Path, standalone: StandalonePort, monkeypatch: pytest.MonkeyPatch
) -> TrainingOrchestrator:
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # a process group could not be undone
    made = TrainingOrchestrator("nowhere:1", storage_path=tmp_path, save_every_steps=2, preempt_signals=())
    monkeypatch.setattr(made, "_join", lambda: standalone)
    return made


def test_a_newer_world_is_adopted_while_joining(
    orchestrator: TrainingOrchestrator, standalone: StandalonePort
) -> None:
    standalone.cluster.next_world()
    with orchestrator.init(state={"w": np.zeros(1)}) as run:
        assert (standalone.rejoined, run.world.generation) == (1, standalone.cluster.job.author(0).generation)


def test_a_newer_world_is_adopted_before_the_first_batch_and_not_after(
    orchestrator: TrainingOrchestrator, standalone: StandalonePort
) -> None:
    state = {"w": np.zeros(1)}
    run = orchestrator.init(state=state)
    for _ in run.steps([1, 2, 3, 4]):
        state["w"] += 1
        if run.begun == 4:
            break
    run.checkpoints.wait_until_finished(20)
    run.abandon("the test ends it")
    standalone.cluster.next_world()
    standalone.rejoin()

    state = {"w": np.zeros(1)}
    run = orchestrator.init(state=state)
    assert (run.step, state["w"][0]) == (2, 2)
    standalone.cluster.next_world()
    batches = run.steps([1, 2, 3, 4])
    assert standalone.rejoined == 2, "nothing was handed out yet"
    assert next(batches) == 3
    standalone.cluster.next_world()
    run._ending.over = lambda error: None  # type: ignore[method-assign]  # the original waits for the process's end
    with pytest.raises(StaleGeneration):
        next(batches)
    assert standalone.rejoined == 2
    run.abandon("the test ends it")
    assert standalone.ended == "the test ends it"


@pytest.mark.parametrize("when", ["it joins", "it joins anew", "it begins anew"])
def test_a_process_that_joins_a_done_job_exits_with_0(
    when: str,
    orchestrator: TrainingOrchestrator,
    standalone: StandalonePort,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For example, the process was preempted before it got the report that the job is done, and is restarted."""

    def done() -> None:
        raise JobDone("job j is done: every rank ended with 0")

    def program() -> None:
        with orchestrator.init(state={"w": np.zeros(1)}) as run:
            standalone.cluster.next_world()
            run.steps([1])

    monkeypatch.setattr(standalone, "rejoin", done)
    if when == "it joins":
        monkeypatch.setattr(orchestrator, "_join", done)
    elif when == "it joins anew":
        standalone.cluster.next_world()
    with pytest.raises(SystemExit) as ended:
        program()
    assert ended.value.code == 0
    assert "nothing is left to do: job j is done: every rank ended with 0" in caplog.text


def test_a_refused_process_exits_with_4_and_logs_the_hint(
    orchestrator: TrainingOrchestrator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> None:
        raise Refused("job j finished at 14:02 UTC", hint="give another name")

    monkeypatch.setattr(orchestrator, "_join", refused)
    with pytest.raises(SystemExit) as ended:
        orchestrator.init(state={"w": np.zeros(1)})
    assert ended.value.code == 4
    assert "job j finished at 14:02 UTC (give another name)" in caplog.text


@pytest.mark.parametrize("has_agent", [False, True])
def test_another_refusal_is_raised_to_the_program(
    has_agent: bool, orchestrator: TrainingOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = Refused("its agent refuses it") if has_agent else Conflict("lives elsewhere")

    def refused() -> None:
        raise error

    monkeypatch.setattr(orchestrator, "_join", refused)
    if has_agent:
        monkeypatch.setattr(orchestrator, "_endpoints", None)
        monkeypatch.setenv("STRATA_SOCKET", "ranks.sock")
    with pytest.raises(Refused) as raised:
        orchestrator.init(state={"w": np.zeros(1)})
    assert raised.value is error


@pytest.mark.parametrize("when", ["it begins", "in a step", "in its own code", "at the last save"])
def test_a_job_that_is_done_while_it_trains_ends_the_program_with_0(
    when: str,
    orchestrator: TrainingOrchestrator,
    standalone: StandalonePort,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For example, the process was frozen for long, and the other ranks finished without it."""

    def done(*_: object, **__: object) -> None:
        raise JobDone("job j is done: every rank ended with 0")

    def is_done() -> None:
        monkeypatch.setattr(standalone, "check", done)

    def program() -> None:
        if when == "it begins":
            is_done()
        with orchestrator.init(state={"w": np.zeros(1)}) as run:
            for batch in run.steps([1, 2, 3]):
                if (when, batch) == ("in a step", 2):
                    is_done()
                elif (when, batch) == ("in its own code", 2):
                    is_done()
                    run.context.barrier("its own")
            is_done()

    with pytest.raises(SystemExit) as ended:
        program()
    assert ended.value.code == 0
    assert "nothing is left to do: job j is done: every rank ended with 0" in caplog.text
    assert standalone.ended, "it has left"


def test_a_state_that_does_not_fit_is_reported_as_a_permanent_failure(
    orchestrator: TrainingOrchestrator, standalone: StandalonePort
) -> None:
    with orchestrator.init(state={"w": np.zeros(1)}) as run:
        for _ in run.steps([1, 2]):
            pass
    standalone.rejoin()
    for state, why in (
        ({"w": np.zeros(2)}, "w was saved as float64[1], and is float64[2] here"),
        ({"v": np.zeros(1)}, "v is not in the checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(why)):
            orchestrator.init(state=dict(state))
        assert standalone.code == 78
        assert why in standalone.ended


def test_an_in_process_rank_reports_a_config_error_without_delay(
    orchestrator: TrainingOrchestrator, standalone: StandalonePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    standalone.is_standalone = False
    monkeypatch.setenv("STRATA_RESTART", "in_process")
    monkeypatch.setenv("STRATA_IN_PROCESS", "0")  # restored after the test
    monkeypatch.setattr("strata.training.orchestrator.OVER_S", 60.0)
    wrong = ConfigError("no such bucket")

    def refused(*_: object, **_settings: object) -> None:
        raise wrong

    monkeypatch.setattr("strata.client.checkpoints.manager.CheckpointManager.restore", refused)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="no such bucket"):
        orchestrator.train(lambda it: it.init(state={}))
    assert time.monotonic() - began < 30
    assert (standalone.code, standalone.ended) == (78, "ConfigError: no such bucket")


def test_a_config_error_is_retryable_once_a_checkpoint_exists(
    orchestrator: TrainingOrchestrator, standalone: StandalonePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting worked before: a mount, or the metadata service with credentials, may be missing for a moment."""

    def refused(*_: object, **_settings: object) -> None:
        raise ConfigError("no credentials are found")

    with orchestrator.init(state={"w": np.zeros(1)}) as run:
        for _ in run.steps([1, 2]):
            pass
    standalone.rejoin()
    assert standalone.restore_point is not None
    monkeypatch.setattr("strata.client.checkpoints.manager.CheckpointManager.restore", refused)
    with pytest.raises(ConfigError):
        orchestrator.init(state={"w": np.zeros(1)})
    assert standalone.code == 1


def test_a_transient_error_is_reported_as_an_ordinary_failure(
    orchestrator: TrainingOrchestrator, standalone: StandalonePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **_settings: object) -> None:
        raise StorageError("cannot read x: Too many open files")

    monkeypatch.setattr("strata.client.checkpoints.manager.CheckpointManager.restore", refused)
    with pytest.raises(StorageError):
        orchestrator.init(state={})
    assert standalone.code == 1


def test_closing_a_run_restores_the_exception_hook(orchestrator: TrainingOrchestrator) -> None:
    hook = sys.excepthook
    run = orchestrator.init(state={})
    assert sys.excepthook is not hook
    run.close()
    assert sys.excepthook is hook


def test_train_calls_main_once_if_processes_are_replaced(orchestrator: TrainingOrchestrator) -> None:
    calls = []

    def main(it: TrainingOrchestrator) -> int:
        calls.append(it.init(state={}))
        return 7

    assert orchestrator.train(main) == 7
    assert len(calls) == 1
    with pytest.raises(ZeroDivisionError):
        orchestrator.train(lambda it: 1 // 0)


def test_in_process_mode_refuses_a_direct_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_IN_PROCESS", "1")
    with pytest.raises(Refused, match="orchestrator"):
        init()
