"""The nemesis in virtual time, with faults that record their injections and heals."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from strata.errors import Unavailable
from strata.testing.virtual_time import in_virtual_time
from strata_chaos.faults import Effect, Fault, NoTarget, Wound
from strata_chaos.faults.nemesis import Nemesis
from strata_chaos.faults.schedule import PlannedFault
from strata_chaos.history import History, HistoryWriter
from strata_chaos.run.health import Health
from strata_chaos.run.system import System


class World:
    """A system that releases ten barriers a second, unless a fault stops them."""

    def __init__(self) -> None:
        self.stopped = 0
        self.wrong: list[str] = []
        self.epoch_now = 7
        self._begin = asyncio.get_running_loop().time()

    def releases(self, _job: str) -> int:
        return 0 if self.stopped else int((asyncio.get_running_loop().time() - self._begin) * 10)

    def epoch(self) -> int:
        return self.epoch_now

    async def wait_healthy(self, limit_s: float) -> tuple[float, list[str]]:
        await asyncio.sleep(limit_s if self.wrong else 0.5)
        return (limit_s if self.wrong else 0.5), list(self.wrong)


class NotingFault:
    """A `Fault` that records its times of injection and heal."""

    summary = "notes"

    def __init__(self, name: str, world: World, *, stops: bool = False, effects: tuple[bool, ...] = (True,)):
        self.name = name
        self.world = world
        self.stops = stops
        self.effects = list(effects)
        self.log: list[tuple[str, float]] = []
        self.refusal: Exception | None = None
        self.slow_s = 0.0

    def available(self, backend: str) -> str:
        return "" if backend else "nowhere"

    async def inject(self, _system: System, rng: random.Random) -> Wound:
        if self.refusal is not None:
            raise self.refusal
        await asyncio.sleep(self.slow_s)
        self._note("inject")
        self.world.stopped += self.stops
        return Wound(targets=(f"part-{rng.randrange(10)}",))

    async def took_effect(self, _system: System, _wound: Wound) -> Effect:
        effect = self.effects.pop(0) if len(self.effects) > 1 else self.effects[0]
        return Effect(effect, "seen" if effect else "nothing seen")

    async def heal(self, _system: System, _wound: Wound) -> None:
        self._note("heal")
        self.world.stopped -= self.stops

    def _note(self, what: str) -> None:
        self.log.append((what, round(asyncio.get_running_loop().time() - 1000, 1)))


def planned(fault: str, at_s: float, hold_s: float, number: int = 1) -> PlannedFault:
    return PlannedFault(number=number, fault=fault, at_s=at_s, hold_s=hold_s, choice=3, required=True)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.world = World()
        self.faults: dict[str, NotingFault] = {}
        self.folder = folder
        self.writer = HistoryWriter(folder / "nemesis.jsonl")
        self.printed: list[str] = []
        self.nemesis = Nemesis(
            cast("System", SimpleNamespace(monitor=self.world)),
            cast("Health", self.world),
            self.writer,
            faults=cast("dict[str, Fault]", self.faults),
            barrier_jobs=("barriers-1",),
            recovery_s=30,
            clock=asyncio.get_running_loop().time,
            say=self.printed.append,
        )

    def fault(self, name: str, **how: Any) -> NotingFault:
        self.faults[name] = fault = NotingFault(name, self.world, **how)
        return fault

    def lines(self) -> list[tuple[str, bool | None]]:
        """Return each line of the history: its operation, and its field `effective`."""
        return [(record.op, record.result.get("effective")) for record in History(self.folder)]


@pytest.fixture
def rig(tmp_path: Path) -> Callable[[], Rig]:
    return lambda: Rig(tmp_path)


@in_virtual_time()
async def test_a_fault_is_injected_at_its_time_and_healed_after_its_duration(rig: Callable[[], Rig]) -> None:
    it = rig()
    fault = it.fault("f", effects=(False, True))

    await it.nemesis.run([planned("f", 2, 3)])

    assert fault.log == [("inject", 2.0), ("heal", 5.0)]
    (injury,) = it.nemesis.injuries
    assert (injury.injected, injury.effective, injury.evidence) == (True, True, "seen")
    assert injury.held_s == pytest.approx(3.0, abs=0.01)
    assert injury.whole_s == pytest.approx(0.5)
    assert it.lines() == [("fault.inject", False), ("fault.heal", True)]


@in_virtual_time()
async def test_a_fault_counts_as_effective_once_its_effect_is_seen(rig: Callable[[], Rig]) -> None:
    it = rig()
    it.fault("f", effects=(True, False))

    await it.nemesis.run([planned("f", 0, 1)])

    assert it.nemesis.injuries[0].effective


@in_virtual_time()
async def test_the_same_choice_hits_the_same_target(rig: Callable[[], Rig]) -> None:
    it = rig()
    it.fault("f")

    await it.nemesis.run([planned("f", 0, 1, 1), planned("f", 5, 1, 2)])

    one, two = it.nemesis.injuries
    assert one.targets == two.targets == (f"part-{random.Random(3).randrange(10)}",)


@in_virtual_time()
async def test_barriers_that_continued_are_distinguished_from_stopped_ones(rig: Callable[[], Rig]) -> None:
    it = rig()
    it.fault("harmless")
    it.fault("stopping", stops=True)

    await it.nemesis.run([planned("harmless", 1, 3, 1), planned("stopping", 10, 3, 2)])

    harmless, stopping = it.nemesis.injuries
    assert harmless.barrier_s == pytest.approx(0.2, abs=0.05), "two releases, ten come in a second"
    assert not harmless.barrier_needed_healing
    assert stopping.barrier_s is not None
    assert stopping.barrier_s < 0.5
    assert stopping.barrier_needed_healing


@in_virtual_time()
async def test_the_time_until_a_new_leader_epoch_is_measured(rig: Callable[[], Rig]) -> None:
    it = rig()
    it.fault("f")
    running = asyncio.create_task(it.nemesis.run([planned("f", 1, 5)]))
    await asyncio.sleep(3)
    it.world.epoch_now = 0  # the leader's key is removed: there is no leader
    await asyncio.sleep(1)
    it.world.epoch_now = 9

    await running

    assert it.nemesis.injuries[0].leader_s == pytest.approx(3.0, abs=0.05)


@in_virtual_time()
async def test_a_fault_without_a_target_or_with_a_failed_injection_is_skipped(rig: Callable[[], Rig]) -> None:
    it = rig()
    it.fault("none").refusal = NoTarget("all are broken already")
    it.fault("broken").refusal = Unavailable("iptables does not answer")

    await it.nemesis.run([planned("none", 0, 1, 1), planned("broken", 1, 1, 2)])

    none, broken = it.nemesis.injuries
    assert none.evidence == "not injected: all are broken already"
    assert broken.evidence.startswith("the injection failed: iptables does not answer")
    assert not any(injury.injected for injury in it.nemesis.injuries)
    assert it.lines() == [("fault.skipped", None), ("fault.skipped", None)]


@in_virtual_time()
async def test_a_scripted_fault_waits_for_its_target(rig: Callable[[], Rig]) -> None:
    it = rig()
    fault = it.fault("f")
    fault.refusal = NoTarget("etcd is electing")
    running = asyncio.create_task(it.nemesis.run([planned("f", 1, 2)]))
    await asyncio.sleep(4)
    fault.refusal = None

    await running

    assert fault.log == [("inject", 4.0), ("heal", 6.0)]
    assert it.nemesis.injuries[0].barrier_s == pytest.approx(0.2, abs=0.05), "counted from the injection"


@in_virtual_time()
async def test_a_cluster_that_is_not_healthy_in_time_is_a_finding(rig: Callable[[], Rig]) -> None:
    it = rig()
    it.fault("f")
    it.world.wrong = ["coordinator-1 is not ready"]

    await it.nemesis.run([planned("f", 0, 1)])

    (finding,) = it.nemesis.findings
    assert finding.message == "not well 30 s after f (1): coordinator-1 is not ready"
    assert it.nemesis.injuries[0].whole_s is None


@in_virtual_time()
async def test_the_next_fault_before_recovery_ends_the_wait(rig: Callable[[], Rig]) -> None:
    it = rig()
    it.fault("f")
    it.world.wrong = ["coordinator-1 is not ready"]

    await it.nemesis.run([planned("f", 0, 1, 1), planned("f", 10, 1, 2)])

    assert [finding.message[:24] for finding in it.nemesis.findings] == ["not well 30 s after f (2"]


@pytest.mark.parametrize("slow_s", [0.0, 3.0], ids=["held", "being injected"])
@in_virtual_time()
async def test_a_cancelled_nemesis_heals_first(rig: Callable[[], Rig], slow_s: float) -> None:
    it = rig()
    fault = it.fault("f")
    fault.slow_s = slow_s
    running = asyncio.create_task(it.nemesis.run([planned("f", 1, 100, 1), planned("f", 50, 1, 2)]))
    await asyncio.sleep(2)

    running.cancel()
    await asyncio.wait({running})

    assert running.cancelled()
    assert [what for what, _ in fault.log] == ["inject", "heal"], "and the second never began"


@in_virtual_time()
async def test_a_failed_check_does_not_keep_the_nemesis_from_healing(rig: Callable[[], Rig]) -> None:
    it = rig()
    fault = it.fault("f")
    fault.effects = []

    with pytest.raises(ExceptionGroup):
        await it.nemesis.run([planned("f", 1, 1)])

    assert [what for what, _ in fault.log] == ["inject", "heal"]
