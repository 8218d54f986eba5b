"""A torchrun agent and the workers that torch started: their processes, stops and core dumps."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from typing import cast

import pytest

from strata.agent.rank_process import RankProcess
from strata.agent.relay import Relay
from strata.integrations.torchrun import workers as module
from strata.integrations.torchrun.workers import Workers
from tests.unit.integrations.torchrun.places import place


class Attached:
    """A relay to which ranks 2 and 3 are attached."""

    def __init__(self, children: list[subprocess.Popen[bytes]]) -> None:
        self.processes = {rank: RankProcess(child.pid) for rank, child in zip((2, 3), children, strict=True)}

    def process(self, rank: int) -> RankProcess | None:
        return self.processes.get(rank)


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield started
    for child in started:
        child.kill()
        child.wait()


@pytest.fixture
def workers(children: list[subprocess.Popen[bytes]]) -> Workers:
    it = Workers()
    it.relay = cast("Relay", Attached(children))
    it.begin(place(3))
    return it


def test_a_worker_that_is_evicted_is_killed_and_why_is_known(
    workers: Workers, children: list[subprocess.Popen[bytes]]
) -> None:
    assert workers.may_request_stop()
    workers.evict(2, 3, "frozen")
    assert children[0].wait(10) == -signal.SIGKILL
    assert workers.evicted == {2: "frozen"}
    assert not workers.may_request_stop(), "torch is about to end the others"


def test_a_worker_that_ended_by_itself_keeps_its_own_reason(
    workers: Workers, children: list[subprocess.Popen[bytes]]
) -> None:
    children[0].kill()
    children[0].wait()
    workers.evict(2, 3, "its connection ended")
    assert not workers.evicted


@pytest.mark.parametrize("newer", [False, True])
async def test_a_core_is_cut_off_after_a_while_unless_a_newer_generation_runs(
    workers: Workers,
    children: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    newer: bool,
) -> None:
    monkeypatch.setattr(module, "CORE_S", 0.1)
    workers.rank_dumps_core(3, 3, "it dumps core")
    assert not workers.evicted, "torch counts what it finds ended"
    if newer:
        workers.relay = cast("Relay", Attached(children))
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, over.set)  # due after CORE_S has passed
    await over.wait()
    assert workers.evicted == ({} if newer else {3: "it dumps core"})
    if newer:
        assert children[1].poll() is None
    else:
        assert await asyncio.to_thread(children[1].wait, 10) == -signal.SIGKILL
