from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from strata.checkpoint.catalog.protocol import CheckpointMetadata, SaveRequest
from strata.checkpoint.save import writer
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.snapshot import memory
from strata.errors import CheckpointAborted, CheckpointError, ConfigError, StorageError, Unavailable
from tests.unit.checkpoint.writer_rig import LIMIT_S, Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.go.set()
    rig.writer.close()


def test_write_returns_when_the_state_is_copied(rig: Rig) -> None:
    rig.go.clear()
    array = np.ones(3)
    info = rig.write(20, {"a": array})
    array[:] = 0
    assert (info.staged, info.committed, info.done) == (True, False, False)
    assert info.path.endswith("-a0"), "known before it is written"
    rig.go.set()
    assert info.wait(LIMIT_S) is info
    assert info.committed
    checkpoint = rig.catalog.all()[0]
    assert (info.path, info.id) == (checkpoint.path, checkpoint.id)
    assert rig.loaded()["a"].tolist() == [1, 1, 1]


def returns_after_go(rig: Rig, write: Callable[[], object]) -> None:
    """Assert that `write`, called in a thread, returns once the disk proceeds, and not before."""
    returned = threading.Event()

    def run() -> None:
        write()
        returned.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert rig.waiting.wait(LIMIT_S)
    assert not returned.wait(0.05)
    rig.go.set()
    thread.join(LIMIT_S)
    assert returned.is_set()


def test_two_saves_may_be_in_flight_and_a_third_write_blocks(rig: Rig) -> None:
    rig.go.clear()
    rig.write(20)
    rig.write(40)
    returns_after_go(rig, lambda: rig.write(60))
    rig.writer.wait_until_finished(LIMIT_S)
    assert rig.steps() == [20, 40, 60]


@pytest.mark.parametrize(
    "ask",
    [
        lambda rig, info: rig.write(20),
        lambda rig, info: rig.writer.wait_until_finished(LIMIT_S),
        lambda rig, info: rig.writer.check_for_errors(),
        lambda rig, info: info.wait(LIMIT_S),
    ],
    ids=["write", "wait_until_finished", "check_for_errors", "wait"],
)
def test_a_save_error_is_raised_once_by_the_next_call(
    rig: Rig, ask: Callable[[Rig, CheckpointInfo], object]
) -> None:
    rig.full.add(20)
    info = rig.write(20)
    rig.writer.settle()
    assert isinstance(info.error, StorageError)
    with pytest.raises(StorageError, match="disk full"):
        ask(rig, info)
    rig.writer.check_for_errors()
    rig.full.clear()
    rig.write(20).wait(LIMIT_S)
    assert rig.steps() == [20]
    assert [saved.step if saved else None for saved in rig.after] == [None, 20]


def test_two_save_errors_are_raised_together(rig: Rig) -> None:
    rig.full |= {20, 40}
    rig.go.clear()
    rig.write(20)
    rig.write(40)
    rig.go.set()
    with pytest.raises(StorageError) as caught:
        rig.writer.wait_until_finished(LIMIT_S)
    assert "step 40 failed as well" in caught.value.__notes__[0]
    rig.writer.check_for_errors()


def test_close_waits_and_raises() -> None:
    rig = Rig()
    rig.full.add(40)
    rig.write(20)
    rig.write(40)
    with pytest.raises(StorageError):
        rig.writer.close()
    rig.writer.close()
    assert rig.steps() == [20]
    with pytest.raises(ConfigError, match="closed"):
        rig.write(60)


def test_close_logs_which_save_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "REPORT_INTERVAL_S", 0.01)
    rig, logged = Rig(), []

    def hear(record: logging.LogRecord) -> bool:
        logged.append(record.getMessage())
        if len(logged) == 2:
            rig.go.set()
        return True

    monkeypatch.setattr(writer.log, "filters", [hear])
    rig.go.clear()
    rig.write(20, {"a": np.ones(1000)})
    rig.writer.close()
    assert rig.steps() == [20]
    assert re.fullmatch(r"the exit waits for the save of step 20 \(0 of \d+ bytes .*", logged[0])


def test_an_unsupported_value_is_an_error_at_once_and_costs_no_arena(rig: Rig) -> None:
    for _ in range(5):
        with pytest.raises(CheckpointError, match="key"):
            rig.write(20, {"key": object()})
    rig.write(20).wait(LIMIT_S)


def test_a_save_can_be_cancelled_while_it_is_written(rig: Rig) -> None:
    rig.go.clear()
    info = rig.write(20, {"a": np.ones(1000)})
    assert rig.waiting.wait(LIMIT_S)
    assert info.cancel()
    rig.go.set()
    with pytest.raises(CheckpointAborted, match="cancelled"):
        info.wait(LIMIT_S)
    assert rig.steps() == []
    done = rig.write(40)
    done.wait(LIMIT_S)
    assert not done.cancel()


def test_waiting_has_a_limit(rig: Rig) -> None:
    rig.go.clear()
    info = rig.write(20)
    with pytest.raises(Unavailable, match="step 20 is not done"):
        info.wait(0.01)
    with pytest.raises(Unavailable, match="1 saves"):
        rig.writer.wait_until_finished(0.01)
    rig.go.set()
    info.wait(LIMIT_S)


def test_an_error_of_the_after_save_callback_is_raised() -> None:
    def broken(saved: CheckpointMetadata | None) -> None:
        raise StorageError("old checkpoints cannot be removed")

    rig = Rig(after_save=broken)
    info = rig.write(20)
    with pytest.raises(StorageError, match="cannot be removed"):
        rig.writer.wait_until_finished(LIMIT_S)
    assert info.committed
    rig.write(40)
    with pytest.raises(StorageError):
        rig.writer.close()
    assert rig.steps() == [20, 40]


def test_an_error_of_a_progress_callback_is_raised_as_a_checkpoint_error(rig: Rig) -> None:
    def broken(info: CheckpointInfo) -> None:
        raise ZeroDivisionError("in a progress callback")

    info = rig.writer.write({"a": np.ones(1)}, SaveRequest(step=20), progress=broken)
    with pytest.raises(CheckpointError, match="in a progress callback") as caught:
        info.wait(LIMIT_S)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_program_that_fails_waits_no_longer_than_it_may() -> None:
    rig = Rig(failing_grace_s=0.05)
    rig.go.clear()
    rig.write(20)
    with pytest.raises(Unavailable, match="left unfinished"):
        rig.writer.close(failing=True)
    rig.go.set()


def test_a_forked_child_is_refused(rig: Rig) -> None:
    rig.write(20).wait(LIMIT_S)
    child = os.fork()
    if child == 0:
        try:
            rig.write(40)
        except ConfigError as error:
            os._exit(0 if "forked" in str(error) else 3)
        os._exit(4)
    assert os.waitpid(child, 0)[1] == 0


# -- little memory ----------------------------------------------------------------------------


def test_with_little_memory_write_returns_when_the_state_is_written() -> None:
    rig = Rig(low_memory=True)
    rig.go.clear()
    array = np.arange(100_000.0)
    state = {"a": array, "strided": array[::2], "raw": b"bytes", "none": array[:0]}
    returns_after_go(rig, lambda: rig.write(20, state))
    array[:] = 0
    rig.writer.wait_until_finished(LIMIT_S)
    saved = rig.loaded()
    assert np.array_equal(saved["a"], np.arange(100_000.0))
    assert np.array_equal(saved["strided"], np.arange(100_000.0)[::2])
    assert (saved["raw"], saved["none"].shape) == (b"bytes", (0,))
    rig.full.add(40)
    assert isinstance(rig.write(40).error, StorageError)
    with pytest.raises(StorageError, match="disk full"):
        rig.writer.close()


def test_memory_can_be_ready_before_the_first_save(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": np.ones(1 << 20)}
    allocate, sizes = memory.allocate, list[int]()

    def counted(size_bytes: int, *, inherited: bool) -> memoryview:
        sizes.append(size_bytes)
        return allocate(size_bytes, inherited=inherited)

    monkeypatch.setattr(memory, "allocate", counted)
    rig.writer.prepare(state)
    large = [size for size in sizes if size >= state["a"].nbytes]
    assert len(large) == writer.MAX_IN_FLIGHT
    sizes.clear()
    rig.go.clear()
    infos = [rig.write(step, state) for step in (20, 40)]
    rig.go.set()
    for info in infos:
        info.wait(LIMIT_S)
    assert all(size < state["a"].nbytes for size in sizes)


def test_errors_are_raised_even_while_no_thread_can_start(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    rig.full.add(20)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert rig.write(10).committed
        info = rig.write(20)
    assert info.done
    with pytest.raises(StorageError, match="disk full"):
        rig.write(30)
    assert capsys.readouterr().err == ""
    rig.write(40).wait(LIMIT_S)
    assert rig.steps() == [10, 40]


def test_a_save_is_committed_even_if_a_commit_callback_raises(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.go.clear()
    info, committed = rig.write(20), list[bool]()

    def broken() -> None:
        raise ZeroDivisionError("of who hears it")

    info.on_commit(broken)
    info.on_commit(lambda: committed.append(info.committed))
    rig.go.set()
    assert info.wait(LIMIT_S).committed
    assert committed == [False], "before anybody sees it, and although the first one failed"
    assert "of who hears it" in caplog.text
