"""The nemesis carries out a plan: it injects each fault at its time, checks its effect, and heals it.

Each fault has its own task, so faults may overlap. A fault is healed even if its task fails or is cancelled. It
writes each injection and each healing to the history `nemesis.jsonl`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from strata.errors import StrataError
from strata_chaos.faults import Effect, Fault, NoTarget, Wound
from strata_chaos.faults.record import Injury
from strata_chaos.faults.schedule import PlannedFault
from strata_chaos.history import HistoryWriter, Outcome, Record
from strata_chaos.judgement.verdict import Finding
from strata_chaos.run.health import Health
from strata_chaos.run.system import System

CLIENT: Final = "nemesis"
GRACE_S: Final = 5.0
"""How long a scripted fault waits for a target."""
_POLL_S: Final = 0.02
_RELEASES: Final = 2
"""Number of releases that prove progress. One is not enough: its round may have been complete before the injection."""

Say = Callable[[str], None]
_T = TypeVar("_T")


class _Look(NamedTuple):
    """State of the system at one moment."""

    at_s: float
    epoch: int
    releases: Mapping[str, int]
    """Number of barrier releases of each job."""


class Nemesis:
    """Breaks one system. `clock` is CLOCK_BOOTTIME in seconds, as in all histories."""

    def __init__(
        self,
        system: System,
        health: Health,
        writer: HistoryWriter,
        *,
        faults: Mapping[str, Fault],
        barrier_jobs: Sequence[str],
        recovery_s: float,
        clock: Callable[[], float],
        say: Say,
    ) -> None:
        self._system = system
        self._health = health
        self._writer = writer
        self._faults = faults
        self._barrier_jobs = tuple(barrier_jobs)
        self._recovery_s = recovery_s
        self._clock = clock
        self._say = say
        self._in_force = 0
        self._calm: set[asyncio.Task[None]] = set()
        self.injuries: list[Injury] = []
        self.findings: list[Finding] = []

    def phase(self, name: str) -> None:
        """Record that a phase of the run begins."""
        now = self._clock()
        self._line("run.phase", now, {"phase": name}, {})

    def placed(self, job: str, host: str) -> None:
        """Record the host on which the processes of a job run: a fault of this host affects no other processes."""
        now = self._clock()
        self._line("job.placed", now, {"job": job, "host": host}, {})

    async def run(self, plan: Sequence[PlannedFault]) -> None:
        """Carry out the plan; return once every fault is healed and its recovery measured."""
        begin_s = self._clock()
        async with asyncio.TaskGroup() as tasks:
            for planned in plan:
                injury = Injury(planned=planned)
                self.injuries.append(injury)
                tasks.create_task(self._one(injury, begin_s + planned.at_s), name=f"fault {planned.number}")

    async def _one(self, injury: Injury, at_s: float) -> None:
        planned = injury.planned
        await asyncio.sleep(max(0.0, at_s - self._clock()))
        fault = self._faults[planned.fault]
        due_s = self._clock()
        args = {"id": planned.number, "fault": planned.fault}
        try:
            wound, before = await self._wound(fault, planned)
        except NoTarget as reason:
            injury.evidence = f"not injected: {reason}"
            self._line("fault.skipped", due_s, args, {"reason": str(reason)}, outcome=Outcome.FAIL)
            self._say(f"{planned.fault}: {injury.evidence}")
            return
        except (StrataError, OSError, TimeoutError) as error:
            injury.evidence = f"the injection failed: {error}"
            self._line("fault.skipped", due_s, args, {"reason": str(error)}, outcome=Outcome.UNKNOWN)
            self._say(f"{planned.fault}: {injury.evidence}")
            return
        injury.injected, injury.targets = True, wound.targets
        args["targets"] = list(wound.targets)
        self._disturbed()
        self._in_force += 1
        injected_s = self._clock()
        watching = asyncio.create_task(self._watch(injury, before))
        try:
            self._note(injury, await fault.took_effect(self._system, wound))
            result = {"effective": injury.effective, "evidence": injury.evidence}
            self._line("fault.inject", before.at_s, args, result)
            self._say(f"{planned.fault}: {', '.join(wound.targets)} for {planned.hold_s:g} s")
            await asyncio.sleep(max(0.0, injected_s + planned.hold_s - self._clock()))
        finally:
            await _finished(self._heal(fault, wound, injury, injected_s, args))
            self._in_force -= 1
        try:
            await self._recover(injury)
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def _wound(self, fault: Fault, planned: PlannedFault) -> tuple[Wound, _Look]:
        """Inject a fault; return its wound, and the state before the injection.

        A scripted fault waits up to `GRACE_S` for its target, for example while etcd elects a leader.
        """
        limit_s = self._clock() + (GRACE_S if planned.required else 0.0)
        while True:
            before = self._look()
            try:
                return await self._injected(fault, planned), before
            except NoTarget:
                if self._clock() >= limit_s:
                    raise
            await asyncio.sleep(_POLL_S)

    async def _injected(self, fault: Fault, planned: PlannedFault) -> Wound:
        """Inject a fault. If this task is cancelled meanwhile, heal the fault before raising the cancellation."""
        task = asyncio.create_task(fault.inject(self._system, random.Random(planned.choice)))
        try:
            await asyncio.wait((task,))
            return task.result()
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if task.exception() is None:
                await fault.heal(self._system, task.result())
            raise

    async def _heal(
        self, fault: Fault, wound: Wound, injury: Injury, injected_s: float, args: Mapping[str, Any]
    ) -> None:
        try:
            self._note(injury, await fault.took_effect(self._system, wound))
        finally:
            t0 = self._clock()
            injury.held_s = t0 - injected_s
            await fault.heal(self._system, wound)
        result = {
            "effective": injury.effective,
            "evidence": injury.evidence,
            "held_s": round(injury.held_s, 3),
        }
        self._line("fault.heal", t0, args, result)
        self._say(f"{fault.name}: healed; {injury.evidence}")

    def _note(self, injury: Injury, effect: Effect) -> None:
        """Note the newest result of `took_effect`; a negative result never replaces a positive one."""
        if effect.effective or not injury.effective:
            injury.effective, injury.evidence = effect.effective, effect.evidence

    # -- recovery times

    def _look(self) -> _Look:
        monitor = self._system.monitor
        releases = {job: monitor.releases(job) for job in self._barrier_jobs}
        return _Look(self._clock(), monitor.epoch(), releases)

    async def _watch(self, injury: Injury, before: _Look) -> None:
        """While the fault is in force, note the times of a new leader and of the next barrier releases."""
        while injury.leader_s is None or injury.barrier_s is None:
            passed_s = self._clock() - before.at_s
            if injury.leader_s is None and self._system.monitor.epoch() not in {0, before.epoch}:
                injury.leader_s = passed_s
            if injury.barrier_s is None and not injury.held_s and self._released(before):
                injury.barrier_s = passed_s
            await asyncio.sleep(_POLL_S)

    def _released(self, before: _Look) -> bool:
        """Return whether every job with barriers has made progress since `before`; False if no job has barriers."""
        return bool(before.releases) and all(
            self._system.monitor.releases(job) >= count + _RELEASES for job, count in before.releases.items()
        )

    async def _recover(self, injury: Injury) -> None:
        """Note when the system is healthy again, unless another fault is in force or starts meanwhile."""
        if self._in_force:
            return
        healed = self._look()
        waiting = asyncio.create_task(self._whole(injury))
        self._calm.add(waiting)
        try:
            while injury.barrier_s is None and not waiting.done():
                if self._released(healed):
                    injury.barrier_s = self._clock() - healed.at_s
                    injury.barrier_needed_healing = True
                await asyncio.sleep(_POLL_S)
            await asyncio.wait({waiting})
        finally:
            waiting.cancel()
            self._calm.discard(waiting)

    async def _whole(self, injury: Injury) -> None:
        took_s, wrong = await self._health.wait_healthy(self._recovery_s)
        if not wrong:
            injury.whole_s = took_s
            return
        planned = injury.planned
        problem = f"not well {took_s:.0f} s after {planned.fault} ({planned.number}): {'; '.join(wrong)}"
        self.findings.append(Finding(checker="recovery", message=problem, evidence=(injury.evidence,)))
        self._say(problem)

    def _disturbed(self) -> None:
        """Stop waiting for a healthy system after earlier faults, because another fault was injected."""
        for waiting in self._calm:
            waiting.cancel()

    # -- the history

    def _line(
        self,
        op: str,
        t0: float,
        args: Mapping[str, Any],
        result: Mapping[str, Any],
        *,
        outcome: Outcome = Outcome.OK,
    ) -> None:
        self._writer.write(
            Record(
                client=CLIENT,
                process=os.getpid(),
                op=op,
                t0=t0,
                t1=self._clock(),
                outcome=outcome,
                args=dict(args),
                result=dict(result),
            )
        )


async def _finished(work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`. If this task is cancelled meanwhile, raise the cancellation once `work` is done."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        task.cancelled() or task.exception()  # mark its error as retrieved: only the cancellation is raised
        raise
    return task.result()
