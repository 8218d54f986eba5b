"""Fixtures for several ranks in one process: without a process group, and without forked data-loader workers."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator

import pytest

from strata.training.group import end_group, ensure_group
from strata.training.rank_context import RankContext
from strata.training.stop.preempting import PREEMPT_SIGNALS

multiprocessing.set_forkserver_preload(["torch", "torchdata.stateful_dataloader"])


def _no_group_of_several(context: RankContext, *, arm: Callable[[], None]) -> bool:
    """Initialise no group of several ranks, as in a process that has not imported torch."""
    return context.world_size == 1 and ensure_group(context, arm=arm)


@pytest.fixture(autouse=True)
def no_group_of_several(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Initialise no process group of several ranks, even if an earlier test imported torch.

    A group of one rank is destroyed after the test, because a preempted rank does not destroy it: its process would
    end.
    """
    monkeypatch.setattr("strata.training.restore.ensure_group", _no_group_of_several)
    yield
    end_group()


@pytest.fixture(autouse=True)
def workers_of_a_fork_server() -> Iterator[None]:
    """Fork data-loader workers from a server process without threads.

    pytest's process has threads of earlier tests. A worker forked from pytest's process inherits every lock that such
    a thread holds, and may wait for the lock forever. `tests/integration` tests workers that are forked from a
    trainer; each trainer has its own process.
    """
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture(autouse=True)
def nobody_leaves_at_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a rank that a test left behind from ending pytest's process once its grace is over."""
    monkeypatch.setattr("strata.training.stop.stopper.exit_preempted", lambda: None)


@pytest.fixture(autouse=True)
def signals_are_given_back() -> Iterator[None]:
    """Fail a test that leaves its preemption handler installed: a second signal in a later test would end pytest."""
    before = [signal.getsignal(number) for number in PREEMPT_SIGNALS]
    yield
    assert [signal.getsignal(number) for number in PREEMPT_SIGNALS] == before
