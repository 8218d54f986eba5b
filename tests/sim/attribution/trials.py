"""Trials of the attribution: a simulated training with or without a fault, and the diagnosis of one replica."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from strata.coordinator.status.diagnosis import diagnose_job
from strata.core.health.findings import CRASHED, SLOW, STALLED, Finding
from strata.testing import virtual_time
from tests.sim.attribution.simulated_training import DUMP_S, Fault, Shape, Training

POLL_S: Final = 0.25
LOOKED_FOR_S: Final = 8.0
"""How long after the injection the diagnosis is read. Only findings within `IN_TIME_S` count as in time."""
IN_TIME_S: Final = 5.0
QUIET_S: Final = 20.0
EARLIEST_STEP: Final = 12
"""Steps that a generation completes before a fault."""

WORLDS: Final = ((2, 4), (4, 2), (8, 1), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8))
"""(hosts, ranks of each): 8 to 256 ranks."""
WEIGHTS: Final = (5, 4, 4, 8, 8, 6, 4, 2)

CAUSES: Final = {
    "slow compute": "compute",
    "slow data": "data",
    "slow host": "host",
    "throttled": "device",
    "stuck in data": "data",
    "stuck on disk": "data",
    "deadlock": "code",
    "stuck in save": "storage",
    "stopped": "stopped",
    "silent": "silent",
    "exited": "exit",
    "node lost": "lost",
}
"""Kind of fault -> cause that the diagnosis must name."""

PLAN: Final = {
    "slow compute": 36,
    "slow data": 30,
    "slow host": 22,
    "throttled": 22,
    "stuck in data": 14,
    "stuck on disk": 8,
    "deadlock": 18,
    "stuck in save": 14,
    "stopped": 14,
    "silent": 8,
    "exited": 8,
    "node lost": 6,
}
"""Kind of fault -> number of trials: 200 in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The diagnosis of one replica in one trial."""

    seed: int
    kind: str
    size: int
    after_s: float | None
    """Seconds from the injection until exactly the faulty ranks were named; None if that took more than
    `LOOKED_FOR_S`."""
    cause: str
    """The cause named at that time."""
    innocent: tuple[str, ...]
    """Sentences that blamed other ranks, at any time."""

    @property
    def right_ranks(self) -> bool:
        return self.after_s is not None and not self.innocent

    @property
    def right_cause(self) -> bool:
        return self.right_ranks and self.cause == CAUSES[self.kind]

    @property
    def in_time(self) -> bool:
        return self.right_ranks and self.after_s is not None and self.after_s <= IN_TIME_S


def faulted(seed: int, kind: str, *, most: int = 256, dump_s: float = DUMP_S) -> Verdict:
    """Train for a while without a fault, inject one of this kind, and return the diagnosis of a replica.

    `most`: largest number of ranks. `dump_s`: seconds that the faulty ranks take to write their stacks.
    """
    return virtual_time.run(_faulted(seed, kind, most, dump_s), seed=seed)


def undisturbed(seed: int, kind: str, *, most: int = 256) -> tuple[str, ...]:
    """Train without a fault, or with all ranks equally slow, and return the sentences that blamed a rank."""
    return virtual_time.run(_undisturbed(seed, kind, most), seed=seed)


def _training(chance: random.Random, most: int, *, least_slots: int = 1) -> Training:
    while True:
        hosts, slots = chance.choices(WORLDS, WEIGHTS)[0]
        if slots >= least_slots and hosts * slots <= most:
            break
    shape = Shape(
        hosts=hosts,
        slots=slots,
        compute_s=chance.uniform(0.05, 0.4),
        collective_s=chance.uniform(0.005, 0.05),
        jitter=chance.uniform(0.02, 0.06),
        eval_every=chance.choice([40, 60, 100]),
        save_every=chance.choice([25, 45, 70]),
        restored_step=chance.choice([0, 0, 1200, 88_000]),
    )
    return Training(shape, chance)


async def _faulted(seed: int, kind: str, most: int, dump_s: float) -> Verdict:
    chance = random.Random(f"fault {seed} {kind}")
    hosted = kind in {"slow host", "silent", "node lost"}
    training = _training(chance, most, least_slots=2 if kind == "slow host" else 1)
    life = asyncio.create_task(training.run())
    try:
        innocent = [each.text async for each in _watched(training, chance.uniform(12, 26), chance)]
        shape = training.shape
        # no usual duration is known yet in the first steps and the first save: only a stall's first limits apply then
        while training.made <= (shape.save_every if kind == "stuck in save" else EARLIEST_STEP):
            innocent += [each.text async for each in _watched(training, 1.0, chance)]
        host = 0
        if hosted:
            host = chance.randrange(shape.hosts)
            ranks = frozenset(range(host * shape.slots, (host + 1) * shape.slots))
        else:
            ranks = frozenset([chance.randrange(shape.size)])
        slows = kind in {"slow compute", "slow host", "throttled"}
        began_s = asyncio.get_running_loop().time()
        training.inject(
            Fault(
                kind=kind,
                ranks=ranks,
                at_s=began_s,
                factor=chance.uniform(1.8, 3.0) if slows else 1.0,
                data_s=shape.compute_s * chance.uniform(0.9, 3.0) if kind == "slow data" else 0.0,
                dump_s=dump_s,
            )
        )
        if kind in {"silent", "node lost"}:
            training.freeze_host(host)
        training.saves_next = kind == "stuck in save"
        return await _verdict(seed, training, ranks, began_s, innocent, chance)
    finally:
        await _ended(life)


async def _verdict(
    seed: int,
    training: Training,
    ranks: frozenset[int],
    began_s: float,
    innocent: list[str],
    chance: random.Random,
) -> Verdict:
    fault, after_s, cause = training.fault, None, ""
    assert fault is not None
    replica = chance.choice(training.reported)
    loop = asyncio.get_running_loop()
    while loop.time() - began_s < LOOKED_FOR_S:
        await asyncio.sleep(POLL_S)
        found = list(_accusations(diagnose_job(replica, training.job).findings))
        innocent += [each.text for each in found if not ranks.issuperset(each.ranks)]
        named = frozenset(rank for each in found for rank in each.ranks)
        if after_s is None and named == ranks:
            after_s, cause = loop.time() - began_s, found[0].cause
    return Verdict(
        seed=seed,
        kind=fault.kind,
        size=training.shape.size,
        after_s=after_s,
        cause=cause,
        innocent=tuple(dict.fromkeys(innocent)),
    )


async def _undisturbed(seed: int, kind: str, most: int) -> tuple[str, ...]:
    chance = random.Random(f"{kind} {seed}")
    training = _training(chance, most)
    life = asyncio.create_task(training.run())
    try:
        found = [each.text async for each in _watched(training, chance.uniform(8, 16), chance)]
        if kind == "all slow":
            everybody = frozenset(range(training.shape.size))
            now_s = asyncio.get_running_loop().time()
            slower_data = chance.random() < 0.3
            training.inject(
                Fault(
                    kind="all slow",
                    ranks=everybody,
                    at_s=now_s,
                    factor=1.0 if slower_data else chance.uniform(1.6, 4.0),
                    data_s=training.shape.compute_s * chance.uniform(1.0, 3.0) if slower_data else 0.0,
                    until_s=now_s + chance.uniform(6, 30),
                )
            )
        elif chance.random() < 0.4:
            training.undeclared_eval_s = chance.uniform(2.5, 8.0)
        found += [each.text async for each in _watched(training, QUIET_S, chance)]
        return tuple(dict.fromkeys(found))
    finally:
        await _ended(life)


async def _watched(training: Training, seconds: float, chance: random.Random) -> AsyncIterator[Finding]:
    """Yield the findings of one replica that blame ranks, read every `POLL_S` for `seconds`."""
    replica = chance.choice(training.reported)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + seconds
    while loop.time() < until_s:
        await asyncio.sleep(POLL_S)
        for each in _accusations(diagnose_job(replica, training.job).findings):
            yield each


def _accusations(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings that blame ranks, not those that only repeat a device driver's report."""
    return (each for each in findings if each.kind in {CRASHED, SLOW, STALLED})


async def _ended(life: asyncio.Task[None]) -> None:
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the table of faults and named causes, as text."""
    lines = [f"{'fault':14} {'n':>3} {'ranks':>6} {'cause':>6} {'in time':>8} {'median s':>9}  named causes"]
    for kind in PLAN:
        of = [each for each in verdicts if each.kind == kind]
        if not of:
            continue
        times = sorted(each.after_s for each in of if each.after_s is not None)
        named = Counter(each.cause or "nobody" for each in of)
        lines.append(
            f"{kind:14} {len(of):3} {_ratio(each.right_ranks for each in of):6.1%}"
            f" {_ratio(each.right_cause for each in of):6.1%} {_ratio(each.in_time for each in of):8.1%}"
            f" {times[len(times) // 2] if times else float('nan'):9.2f}"
            f"  {', '.join(f'{cause} {count}' for cause, count in named.most_common())}"
        )
    lines.append(
        f"{'all':14} {len(verdicts):3} {_ratio(each.right_ranks for each in verdicts):6.1%}"
        f" {_ratio(each.right_cause for each in verdicts):6.1%} {_ratio(each.in_time for each in verdicts):8.1%}"
    )
    return "\n".join(lines)


def _ratio(hits: Iterable[bool]) -> float:
    hits = list(hits)
    return sum(hits) / len(hits) if hits else 0.0
