"""`Run` in a process that trains alone: its counts, its saves, and the position it resumes from."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata
from strata.client.checkpoints.manager import CheckpointManager
from strata.errors import BarrierTimeout, CheckpointError, ConfigError, InvalidArgument, Unavailable
from strata.training.rank_context import Alone
from strata.training.save.state import Position
from tests.unit.training.making import make_run
from tests.unit.training.room import LIMIT_S, Room


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRATA_SOCKET", "STRATA_ENDPOINTS", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


class Recorder:
    """A hook that records its calls."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, int]] = []

    def begins(self, step: int) -> None:
        self.reported.append(("begins", step))

    def completed(self, step: int) -> None:
        self.reported.append(("completed", step))

    def closing(self) -> None:
        pass

    def closed(self) -> None:
        self.reported.append(("closed", 0))


def batches(count: int = 6, size: int = 2) -> list[np.ndarray[Any, Any]]:
    return [np.arange(i * size, (i + 1) * size) for i in range(count)]


def started(root: Path, **state: Any) -> strata.Run:
    return strata.init(state=state, storage_path=root, save_every_steps=2)


def test_a_step_is_complete_once_the_body_has_returned(tmp_path: Path) -> None:
    run = started(tmp_path)
    recorder = Recorder()
    run.hooks.append(recorder)
    with run:
        seen = [(run.begun, run.step, batch.tolist()) for batch in run.steps(batches(3))]
    assert seen == [(1, 0, [0, 1]), (2, 1, [2, 3]), (3, 2, [4, 5])]
    calls = [("begins", 1), ("completed", 1), ("begins", 2), ("completed", 2)]
    assert recorder.reported == [*calls, ("begins", 3), ("completed", 3), ("closed", 0)]
    assert run.position == Position(step=3, epoch_samples=6, epoch_batches=3, samples=6)


@pytest.mark.parametrize(
    ("status", "saved", "left"), [(0, [1], 0), (None, [1], 0), (3, [], 1), ("it is broken", [], 1)]
)
def test_an_exit_in_the_block_is_done_unless_its_status_is_an_error(
    status: Any, saved: list[int], left: int, tmp_path: Path
) -> None:
    context = Room(1).rank(0)

    def program() -> None:
        with make_run(context, tmp_path, state={}, wait_s=LIMIT_S) as run:
            run.step_done()
            sys.exit(status)

    with pytest.raises(SystemExit):
        program()
    assert CheckpointManager(tmp_path).all_steps() == saved
    assert context.left is not None
    assert context.left[0] == left


def test_several_batches_may_make_one_step(tmp_path: Path) -> None:
    with started(tmp_path) as run:
        seen = [run.step for _ in run.steps(batches(6), accumulate=3)]
        assert seen == [0, 0, 0, 1, 1, 1]
        assert (run.step, run.position.epoch_batches, run.position.samples) == (2, 6, 12)


def test_a_restarted_run_resumes_at_the_saved_step(tmp_path: Path) -> None:
    weights = np.zeros(1)
    first = started(tmp_path, weights=weights)
    for batch in first.steps(batches(6)):
        weights += batch.sum()
        if first.step == 4:
            break  # in the fifth step, whose body does not return
    first.abandon("the test kills it")

    weights = np.zeros(1)
    with started(tmp_path, weights=weights) as again:
        assert again.step == 4
        assert weights[0] == sum(range(8))
        for batch in again.steps(batches(6)):
            weights += batch.sum()
        assert again.step == 6
    assert weights[0] == sum(range(12))

    with started(tmp_path) as after:  # the end was saved too
        assert after.step == 6
        assert list(after.steps(batches(6))) == []


@pytest.mark.parametrize("then", ["close", "save", "another loop", "at rest"])
def test_a_loop_left_after_the_optimizer_step_has_completed_its_step(then: str, tmp_path: Path) -> None:
    """This holds also while tqdm, say, keeps the loop's iterator alive, so that Python does not report its end."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = strata.init(model=module, optim=optimizer, storage_path=tmp_path)
    named = run.steps(batches(6))
    for _ in named:
        optimizer.step()
        if run.begun == 3:
            break
    match then:
        case "save":
            run.save(wait=True)
        case "another loop":
            for _ in run.steps(batches(1), epoch=1):
                assert run.step == 3
        case "at rest":
            assert run.at_rest
    run.close()
    del named
    assert run.saves.saved_step == run.step == (4 if then == "another loop" else 3)


def test_an_epoch_that_was_left_does_not_go_on_after_a_restart(tmp_path: Path) -> None:
    """The code after the loop has run already, so a save must not say that the epoch goes on."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = strata.init(model=module, optim=optimizer, storage_path=tmp_path, save_every_steps=2)
    for epoch in range(2):
        for _ in run.steps(batches(6)):
            optimizer.step()
            if run.begun == 2 or epoch == 1:
                break
    again = run.steps(batches(6), epoch=1)
    next(again)
    next(again)  # completes a step of epoch 1, and saves it
    run.saves.finish(run.step)
    run.abandon("the test kills it")
    with strata.init(model=module, optim=optimizer, storage_path=tmp_path, save_every_steps=2) as restored:
        assert (restored.step, restored.epoch) == (run.step, 1)
        assert list(restored.steps(batches(6))) == []
        assert [batch[0].item() for batch in restored.steps(batches(6))] == [4, 6, 8, 10]


def test_epochs_that_were_finished_are_passed_over(tmp_path: Path) -> None:
    first = started(tmp_path)
    for epoch in range(3):
        for _ in first.steps(batches(3)):
            if epoch == 1 and first.step == 4:
                break
        if epoch == 1:
            break
    first.abandon("the test kills it")
    seen = []
    with started(tmp_path) as again:
        for epoch in range(3):
            seen += [(epoch, batch[0].item()) for batch in again.steps(batches(3))]
        assert (again.step, again.epoch) == (9, 2)
    assert seen == [(1, 2), (1, 4), (2, 0), (2, 2), (2, 4)]


def drawn(root: Path, *, until: int = 99) -> list[float]:
    """Return the random numbers drawn in a process's steps; the process also draws before them, and dies in `until`."""
    run = started(root)
    random.random()
    numbers = []
    for _ in run.steps(batches(6)):
        numbers.append(random.random())
        if run.begun == until:
            run.abandon("the test kills it")
            return numbers
    run.close()
    return numbers


def test_random_draws_before_a_restored_runs_first_step_change_nothing(tmp_path: Path) -> None:
    """For example, a sampler draws its seed when a loader is created after strata.init."""
    random.seed(1)
    wanted = drawn(tmp_path / "one")
    random.seed(1)
    assert drawn(tmp_path / "two", until=5) == wanted[:5]
    random.seed(2)
    assert drawn(tmp_path / "two") == wanted[4:]


def test_random_states_are_restored_only_before_the_first_step_of_a_restored_run(
    tmp_path: Path,
) -> None:
    for step_before in (0, 1):  # none in a new run, one in the run that is restored from it
        run = started(tmp_path)
        for _ in range(step_before):
            run.step_done()
        random.seed(3)
        next(run.steps(batches(6)))
        assert random.random() == random.Random(3).random()
        run.step_done()
        run.close()


def test_a_custom_loop_completes_its_steps_by_step_done(tmp_path: Path) -> None:
    recorder = Recorder()
    with started(tmp_path) as run:
        run.hooks.append(recorder)
        run.step_done(samples=10)
        run.step_done(samples=10)
        assert (run.step, run.begun, run.position.samples) == (2, 3, 20)
        calls = [("begins", 1), ("completed", 1), ("begins", 2), ("completed", 2), ("begins", 3)]
        assert recorder.reported == calls
    with started(tmp_path) as again:
        assert (again.step, again.position.samples) == (2, 20)


def test_an_exception_of_a_hook_leaves_the_loop(tmp_path: Path) -> None:
    class Stop(Recorder):
        def completed(self, step: int) -> None:
            raise SystemExit(75)

    run = started(tmp_path)
    run.hooks.append(Stop())
    with pytest.raises(SystemExit), run:
        for _ in run.steps(batches(3)):
            pass
    assert run.step == 1


def test_several_processes_need_a_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes train together"):
        started(tmp_path)


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True])
def test_accumulate_is_a_number_from_1_on(tmp_path: Path, accumulate: Any) -> None:
    with started(tmp_path) as run, pytest.raises(InvalidArgument):
        run.steps(batches(1), accumulate=accumulate)


def test_settings_come_from_arguments_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_TRAIN_SAVE_EVERY_STEPS", "3")
    monkeypatch.setenv("STRATA_TRAIN_STORAGE", str(tmp_path / "elsewhere"))
    with strata.init() as run:
        for _ in run.steps(batches(4)):
            pass
        run.checkpoints.wait_until_finished()
        assert run.checkpoints.all_steps() == [3]
    with pytest.raises(ConfigError, match="two rules"):
        strata.init(save_every_s=3)


def test_a_training_may_save_incrementals_between_full_checkpoints(tmp_path: Path) -> None:
    state = {"embedding": np.zeros(4 << 20)}
    with strata.init(state=state, storage_path=tmp_path, save_every_steps=1, full_every=2) as run:
        for _ in run.steps(batches(4)):
            run.checkpoints.wait_until_finished()
        run.checkpoints.wait_until_finished()
        types = {one.step: one.checkpoint_type.value for one in run.checkpoints.all_checkpoints()}
    assert (types[3], types[4]) == ("full", "incremental")
    with pytest.raises(ConfigError, match="full_every"):
        strata.init(storage_path=tmp_path, full_every=-1)


def test_goodput_accumulates_over_generations(tmp_path: Path) -> None:
    first = started(tmp_path)
    for _ in first.steps(batches(6)):
        if first.step == 4:
            break
    first.abandon("the test kills it")
    before = first.goodput()
    with started(tmp_path) as again, again.phase("eval"):
        pass
    after = again.goodput()
    assert {"step", "save", "restore", "lost", "eval"} <= after.spent_s.keys()
    assert after.total_s >= before.total_s
    assert 0 < after.ratio < 1


class Late(Alone):
    """A world whose other rank enters a barrier only in the third round."""

    def __init__(self) -> None:
        super().__init__(world_size=1)
        self.rounds = 0
        self.code: int | None = None

    def barrier(self, name: str, payload: bytes | None = None, **_: Any) -> dict[int, bytes]:
        self.rounds += 1
        if self.rounds < 3:
            raise BarrierTimeout("1 of 2 arrived", missing=["rank 1"])
        return {0: payload or b""}

    def close(self, *, code: int = 0, reason: str = "") -> None:
        self.code = code


def test_the_end_waits_for_a_rank_that_still_evaluates(tmp_path: Path) -> None:
    context = Late()
    run = make_run(context, tmp_path, state={}, wait_s=1.0)
    run.step_done()
    run.close()
    assert (context.rounds, context.code, run.checkpoints.all_steps()) == (3, 0, [1])


def test_a_close_that_no_other_rank_joins_raises_a_timeout(tmp_path: Path) -> None:
    context = Late()
    run = make_run(context, tmp_path, state={}, wait_s=1.0)
    run.step_done()
    with pytest.raises(BarrierTimeout):
        run.close(patient=False)
    assert (context.rounds, context.code) == (1, 1)


class Timed(Alone):
    """A world that records the timeout of each barrier."""

    def __init__(self) -> None:
        super().__init__(world_size=1)
        self.given_s: list[float | None] = []

    def barrier(
        self, name: str, payload: bytes | None = None, *, timeout_s: float | None = None, **_: Any
    ) -> dict[int, bytes]:
        self.given_s.append(timeout_s)
        return {0: payload or b""}


@pytest.mark.parametrize("what", ["a save", "a copy"])
def test_an_earlier_failure_does_not_keep_the_last_step_from_being_saved(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(Alone(world_size=1), tmp_path, state={}, wait_s=1.0)
    run.step_done()

    def failing(*_: Any) -> None:
        raise CheckpointError("the disk was full")

    if what == "a save":
        with pytest.raises(CheckpointError):
            run.checkpoints.save_state({"w": np.zeros(4)}, 1, progress=failing).wait(20)
        failed = run.checkpoints.save_state({"w": np.zeros(4)}, 1, progress=failing)
        assert failed.staged
    else:
        monkeypatch.setattr(run.checkpoints._tiers, "check_for_errors", failing)
    info = run.save_common(over=lambda: False)
    assert info is not None
    assert info.wait(20).committed
    run.abandon("the end", code=0)
    reported = "a save was lost as well: the disk was full" in caplog.text
    assert reported == (what == "a save"), "which the last save does not hide"


def test_a_common_save_waits_for_all_ranks_and_earlier_saves_unless_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Timed()
    run = make_run(context, tmp_path, state={}, wait_s=1.0)
    assert run.save_common(over=lambda: False) is None, "a training that has just begun has nothing to save"
    run.step_done()
    assert run.save_common(over=lambda: False) is not None
    assert context.given_s[-1] is None, "no rank gives up by itself"
    run.step_done()
    hangs = threading.Event()
    monkeypatch.setattr(run.checkpoints, "settle", hangs.wait)
    with pytest.raises(Unavailable, match="saves in flight"):
        run.save_common(over=lambda: True)
    hangs.set()
    run.abandon("the end", code=0)


def test_a_closing_rank_meets_a_rank_that_saves_the_same_step(tmp_path: Path) -> None:
    """Rank 0 leaves its loop by break at a step. Rank 1 completes that step, and a save is due for it."""
    room = Room(2)
    ended: dict[int, int] = {}

    def train(rank: int) -> None:
        run = make_run(room.rank(rank), tmp_path / str(rank), state={}, wait_s=LIMIT_S)
        run.step_done()
        if rank == 1:
            run.save()
        run.close()
        ended[rank] = run.saves.saved_step

    ranks = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_S / 2)
    assert ended == {0: 1, 1: 1}


def test_a_step_whose_save_was_dropped_is_saved_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(Alone(world_size=1), tmp_path, state={"w": np.zeros(3)}, wait_s=1.0)
    run.step_done()

    def fails(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails)
        run.saves.out_of_time = lambda: True
        info = run.save(wait=True)
    assert info is not None
    assert info.dropped
    run.saves.out_of_time = lambda: False
    run.close()
    assert CheckpointManager(tmp_path).all_steps() == [1]


def test_plain_values_are_saved_at_their_step_and_restored_in_place(tmp_path: Path) -> None:
    state: dict[str, Any] = {"seen": 0, "names": ["a"], "array": np.zeros(2)}
    with strata.init(state=state, storage_path=tmp_path, save_every_steps=2) as run:
        for step in range(1, 6):
            state["seen"] += step
            state["names"] = [*state["names"], str(step)]
            state["array"] = np.full(2, float(step))  # another array than the one that was passed to `init`
            run.step_done(1)
    again: dict[str, Any] = {"seen": 0, "names": [], "array": np.zeros(2)}
    with strata.init(state=again, storage_path=tmp_path) as run:
        assert run.step == 5
        assert (again["seen"], again["names"]) == (15, ["a", "1", "2", "3", "4", "5"])
        assert again["array"].tolist() == [5.0, 5.0]


def test_entries_added_to_or_deleted_from_the_state_later_are_not_restored(tmp_path: Path) -> None:
    state: dict[str, Any] = {"kept": 1, "gone": 2}
    with strata.init(state=state, storage_path=tmp_path, save_every_steps=1) as run:
        state["model"] = "not ours"
        run.step_done(1)
        del state["gone"]
        run.step_done(1)
    again: dict[str, Any] = {"kept": 0}
    with strata.init(state=again, storage_path=tmp_path) as run:
        assert (run.step, again) == (2, {"kept": 1})


def test_work_repeated_after_skipped_epochs_changes_no_plain_value(tmp_path: Path) -> None:
    def train(until: int) -> dict[str, Any]:
        state: dict[str, Any] = {"epochs": 0, "history": []}
        run = strata.init(state=state, storage_path=tmp_path, save_every_steps=1, preempt_signals=())
        for epoch in range(4):
            for _ in run.steps(batches(3)):
                if run.step == until:
                    run.checkpoints.wait_until_finished()
                    run.abandon("the test kills it")
                    return state
            state["epochs"] += 1
            state["history"].append(epoch)
        run.close()
        return state

    undisturbed = {"epochs": 4, "history": [0, 1, 2, 3]}
    train(until=7)
    assert train(until=-1) == undisturbed
