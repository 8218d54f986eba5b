"""One seed: a minute of faults in a working cluster, then a time without faults, then the judgement."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import structlog

from strata.testing import virtual_time
from tests.sim.cluster import Cluster
from tests.sim.faults import FAULTS, Fault
from tests.sim.judges.stops import saves_first
from tests.sim.programs.maintenance import Maintainer, is_kept
from tests.sim.programs.operator import Operator, is_operated
from tests.sim.trace import Trace

WARM_UP_S = 4.0
FAULTS_S = 46.0
"""How long new faults are begun."""
RUN_S = 62.0
CALM_S = 40.0
"""Time after the last fault within which the cluster must be whole and a barrier must be complete."""
LEAST_EFFECTIVE = 5


@dataclass(slots=True)
class Result:
    """The result of one seed."""

    seed: int
    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    """How often each class of faults took effect."""
    tried: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    digest: str = ""
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    trace: list[str] = field(default_factory=list)


def run_seed(seed: int, *, keep_trace: bool = False) -> Result:
    """Run one seed to its end; errors are part of the result."""
    result = Result(seed)
    began = time.process_time()
    logging.getLogger("strata").setLevel(logging.CRITICAL)
    gc.disable()  # a run is short, and its garbage is collected right after it
    try:
        virtual_time.run(_main(seed, result, keep_trace), seed=seed, limit_s=600)
    except Exception as error:  # noqa: BLE001  # the simulation reports whatever it is
        result.violations.append(f"the run ended by {_leaf(error)!r}")
    finally:
        structlog.reset_defaults()
        logging.getLogger("strata").setLevel(logging.NOTSET)
        gc.enable()
        gc.collect()
    result.cpu_s = time.process_time() - began
    return result


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _main(seed: int, result: Result, keep_trace: bool) -> None:
    trace = Trace(keep=keep_trace)
    trace.capture()
    try:
        async with asyncio.TaskGroup() as tasks:
            cluster = Cluster(seed, tasks, trace)
            cluster.judge.operated = is_operated(seed)
            cluster.judge.kept = is_kept(seed)
            cluster.judge.saves_first = saves_first(seed)
            try:
                await _live(cluster, result)
            finally:
                result.violations += [str(v) for v in cluster.judge.violations]
                cluster.end()
                for task in asyncio.all_tasks():
                    if task is not asyncio.current_task():
                        task.cancel()
    finally:
        result.violations += trace.bugs
        result.events = trace.events
        result.digest = trace.digest()
        result.virtual_s = trace.now_s
        result.trace = trace.lines


async def _live(cluster: Cluster, result: Result) -> None:
    trace = cluster.trace
    cluster.start()
    patrol = asyncio.create_task(cluster.patrol())
    await asyncio.sleep(WARM_UP_S)
    await _disturb(cluster, result)
    calm_s = trace.now_s
    trace.note("run", "calm")
    while (why := await _wrong(cluster)) is not None:
        if trace.now_s - calm_s > CALM_S:
            cluster.judge.wrong(f"{CALM_S:g} s after the last fault: {why}")
            break
        await asyncio.sleep(0.5)
    await asyncio.sleep(max(0.0, RUN_S - trace.now_s))
    patrol.cancel()
    await cluster.compare_views()
    cluster.history.check()
    cluster.judge.settle()
    trace.count("barrier releases heard", cluster.history.released)
    trace.count("acks confirmed", cluster.history.acked)
    trace.count("commits heard", len(cluster.history.committed))
    effective = sum(result.faults.values())
    if effective < LEAST_EFFECTIVE:
        cluster.judge.wrong(f"only {effective} faults took effect")


async def _wrong(cluster: Cluster) -> str | None:
    """Return why the cluster is not whole yet, or None; a barrier of the whole world must be released meanwhile."""
    why = cluster.whole()
    if why is not None:
        return why
    before = cluster.history.released
    await asyncio.sleep(3.0)
    if cluster.history.released == before:
        return "no barrier was released for 3 s"
    return cluster.whole()


async def _disturb(cluster: Cluster, result: Result) -> None:
    """Begin faults until the time is over and enough have taken effect; return once all are healed."""
    trace, rng = cluster.trace, cluster.rng("faults")
    deck: list[Fault] = []
    running: list[asyncio.Task[None]] = []
    number = 0

    async def one(fault: Fault, number: int) -> None:
        trace.note("fault", f"{number} begins: {fault.name}")
        took_effect = await fault.act(cluster, cluster.rng(f"fault {number}"))
        result.tried[fault.name] += 1
        result.faults[fault.name] += took_effect
        trace.note("fault", f"{number} ends: {fault.name}, took effect: {took_effect}")

    operator = Operator(cluster, cluster.rng("operator"))
    operating = asyncio.create_task(operator.run()) if cluster.judge.operated else None
    maintainer = Maintainer(cluster, cluster.rng("keeper"))
    maintaining = asyncio.create_task(maintainer.run()) if cluster.judge.kept else None
    while trace.now_s < WARM_UP_S + FAULTS_S or (
        sum(result.faults.values()) < LEAST_EFFECTIVE and trace.now_s < 3 * FAULTS_S
    ):
        if not deck:
            deck = [fault for fault in FAULTS.values() for _ in range(fault.weight)]
            rng.shuffle(deck)
        number += 1
        running.append(asyncio.create_task(one(deck.pop(), number)))
        await asyncio.sleep(rng.choice((rng.uniform(0, 1.0), rng.uniform(1, 6), rng.uniform(4, 9))))
    await asyncio.wait(running)
    for task in running:
        task.result()
    if maintaining is not None:
        maintaining.cancel()
        await asyncio.wait([maintaining])
        if not maintaining.cancelled():
            maintaining.result()
    if operating is not None:
        operating.cancel()
        await asyncio.wait([operating])
        if not operating.cancelled():
            operating.result()
        async with asyncio.timeout(CALM_S):
            await operator.put_back()


def as_json(result: Result) -> dict[str, Any]:
    """Return the part of a result that a summary needs."""
    return {
        "seed": result.seed,
        "violations": result.violations,
        "faults": dict(result.faults),
        "events": dict(result.events),
        "digest": result.digest,
        "virtual_s": round(result.virtual_s, 3),
        "cpu_s": round(result.cpu_s, 3),
    }
