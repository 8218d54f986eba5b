"""A training in virtual time with planned faults. The ranks' measurements pass through the same parts as in a cluster.

    ComputeTimer ─▶ RankClient ─▶ StallWatch of each host's agent ─▶ ProgressBoard of its replica ─▶ the other replicas'

All of these parts are the shipped code, and messages take as long as they take by session and by gossip. The
simulation provides the ranks' activities and their durations, the text of the ranks' stacks, and the states of their
processes. The simulation uses no rule of the attribution, and a fault never reports itself.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from strata.client.rank.stall_watch import Actions, StallWatch
from strata.coordinator.reports.progress import ProgressBoard
from strata.core.barriers.arrivals import OpenRound
from strata.core.health.stalls import StallLimits
from strata.core.ids import BootId, InstanceId, WorkerId
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import JobSpec, Member, MembersChunk, RankFailed, Worker, WorldHead, encode
from strata.core.kv.txn import Event, KeyValue
from strata.core.kv.view import View
from strata.observe import get_logger
from strata.v1.members_pb2 import DeviceStatus, MemberDevices, RankProgress
from tests.sim.attribution.simulated_rank import GENERATION, JOB, Rank, Upward
from tests.sim.attribution.simulated_stacks import SITE, frames

GOSSIP_S: Final = 1.0
DUMP_S: Final = 0.15
"""How long a rank takes to write its stacks."""
REPLICAS: Final = 3
WARM_UP: Final = (20.0, 3.0, 1.8, 1.3)
"""Factors by which the first steps are longer than usual ones."""
FOREVER: Final = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A training without faults. Times are those of one step."""

    hosts: int
    slots: int
    compute_s: float
    data_s: float = 0.004
    collective_s: float = 0.01
    jitter: float = 0.04
    """Relative spread of compute time from step to step, and also the permanent spread between ranks."""
    pause: float = 0.002
    """Probability that a rank pauses in a step: garbage collection, another process."""
    hiccup: float = 0.003
    """Probability that a rank's loader takes longer in a step."""
    eval_every: int = 60
    save_every: int = 45
    restored_step: int = 0

    @property
    def size(self) -> int:
        return self.hosts * self.slots


@dataclass(slots=True, kw_only=True)
class Fault:
    """A fault of `ranks` from `at_s` on. `kind` decides how the ranks behave; only the simulation knows it."""

    kind: str
    ranks: frozenset[int]
    at_s: float
    factor: float = 1.0
    """Factor by which compute takes longer."""
    data_s: float = 0.0
    """Seconds by which each wait for data takes longer."""
    dump_s: float = DUMP_S
    """Seconds that these ranks take to write their stacks."""
    until_s: float = FOREVER


class _Agent:
    """One host's agent, with the stall watch over its ranks."""

    def __init__(self, training: Training, host: int, board: ProgressBoard) -> None:
        self.training = training
        self.board = board
        self.frozen = False
        up = Upward(self._to_replica)
        self.watch = StallWatch(
            StallLimits.derive(5.0),
            Actions(
                log=get_logger(),
                tell=up.progress,
                stack=self._stack,
                trace=self._no_trace,
                process=training.process_of,
                evict=None,
                blame=self._nobody,
            ),
        )
        self.watch.watch(GENERATION)
        self.worker = f"node-{host}"

    def hear(self, ranks: Sequence[RankProgress]) -> None:
        if not self.frozen:
            self.watch.on_progress(GENERATION, ranks)

    def _to_replica(self, ranks: Sequence[RankProgress]) -> None:
        if not self.frozen:
            self.board.note(JOB, GENERATION, ranks, own=True)

    async def _stack(self, rank: int) -> str | None:
        fault = self.training.fault
        await asyncio.sleep(fault.dump_s if fault is not None and rank in fault.ranks else DUMP_S)
        return self.training.stack_of(rank)

    async def _no_trace(self, rank: int) -> tuple[Path, int] | None:
        return None

    async def _nobody(self) -> None:
        return None


@dataclass(slots=True)
class _Step:
    """The activities of each rank in the present step: load from `began_s` on, then compute, then wait."""

    began_s: float
    wait_s: list[float]
    compute_s: list[float]
    phase: str = "step"
    doing: list[str] = field(default_factory=list)
    """The code that each rank runs while it computes."""


class LiveReports:
    """The reports that one replica has (`coordinator.status.diagnosis.LiveReports`)."""

    def __init__(self, board: ProgressBoard) -> None:
        self.board = board

    def open_rounds(self, job: str) -> Iterator[OpenRound]:
        return iter(())

    def progress(self, job: str, generation: int, ranks: Iterable[int]) -> list[RankProgress]:
        return self.board.ranks(job, generation, ranks)

    def devices(self, job: str) -> Iterator[MemberDevices]:
        return self.board.devices(job)

    def violations(self, job: str) -> Sequence[str]:
        return ()


class Training:
    """A training of `shape`; `run` trains until it is cancelled."""

    def __init__(self, shape: Shape, chance: random.Random) -> None:
        self.shape = shape
        self.chance = chance
        self.fault: Fault | None = None
        self.boards = [ProgressBoard() for _ in range(REPLICAS)]
        self.reported = [LiveReports(board) for board in self.boards]
        self.agents = [_Agent(self, host, self.boards[host % REPLICAS]) for host in range(shape.hosts)]
        self.ranks = [
            Rank(rank, self.agents[rank // shape.slots].hear, chance, size=shape.size, jitter=shape.jitter)
            for rank in range(shape.size)
        ]
        self.step = shape.restored_step
        self.made = 0
        self._injected = asyncio.Event()
        self.saves_next = False
        """If set, a save is due after the present step."""
        self.undeclared_eval_s = 0.0
        """If not 0, the next step contains an evaluation of that duration, which no rank declares."""
        self._now = _Step(0.0, [0.0] * shape.size, [0.0] * shape.size)
        self._view = View()
        self._keys = ClusterKeys("sim")
        self._write_world()
        self.job = JobView(self._view, self._keys.job(JOB))

    # -- the keyspace

    def _put(self, key: str, record: Any, *, deleted: bool = False) -> None:
        revision = self._view.revision + 1
        kv = KeyValue(
            key=key,
            value=b"" if deleted else encode(record),
            create_revision=revision,
            mod_revision=revision,
            version=1,
        )
        self._view.apply(revision, (Event(kv=kv, deleted=deleted),))

    def _write_world(self) -> None:
        keys, shape = self._keys.job(JOB), self.shape
        self._put(keys.spec, JobSpec(min_workers=1, max_workers=shape.hosts))
        places = []
        for number, agent in enumerate(self.agents):
            worker = WorkerId(agent.worker)
            record = Worker(
                boot=BootId("b"), served_by=InstanceId("r"), host=f"host-{number}", slots=shape.slots, pid=1
            )
            self._put(keys.worker(worker), record)
            places.append(
                Member(
                    worker=worker,
                    incarnation=self._view.revision,
                    group_rank=number,
                    slots=shape.slots,
                    first_rank=number * shape.slots,
                )
            )
        self._put(keys.members_chunk(GENERATION, 1, 0), MembersChunk(members=tuple(places)))
        self._incarnations = [place.incarnation for place in places]
        self._put(
            keys.head,
            WorldHead(
                generation=GENERATION, epoch=1, members=shape.hosts, size=shape.size, reason="", chunks=1
            ),
        )

    # -- visible from outside

    def process_of(self, rank: int) -> str:
        if self.is_faulty(rank, "exited"):
            return ""
        if self.is_faulty(rank, "stopped"):
            return "stopped"
        return (
            "running"
            if self._activity(rank) in {"code", "evaluate"} and not self.is_stuck(rank)
            else "sleeping"
        )

    def stack_of(self, rank: int) -> str | None:
        """Return faulthandler's output for a rank's process, or None if it cannot write."""
        if self.is_faulty(rank, "stopped") or self.is_faulty(rank, "exited"):
            return None
        background = (
            "Thread 0x00007f01 (most recent call first):\n"
            '  File "/usr/lib/python3.11/selectors.py", line 468 in select\n'
            f'  File "{SITE}/strata/client/event_loop.py", line 60 in _run\n\n'
        )
        lines = "".join(
            f'  File "{file}", line {line} in {name}\n'
            for file, line, name in frames(self._activity(rank), self.chance)
        )
        return f"{background}Current thread 0x00007f00 (most recent call first):\n{lines}"

    def _activity(self, rank: int) -> str:
        """Return the activity of a rank's main thread at this moment."""
        stuck = {
            "stuck in data": "data",
            "stuck on disk": "disk",
            "deadlock": "lock",
            "stuck in save": "saving",
        }
        fault = self.fault
        if fault is not None and rank in fault.ranks and self.is_stuck(rank) and fault.kind in stuck:
            return stuck[fault.kind]
        step, now_s = self._now, asyncio.get_running_loop().time()
        computing_s = step.began_s + step.wait_s[rank]
        waiting_s = computing_s + step.compute_s[rank]
        if step.phase == "save":
            return "saving" if now_s < waiting_s else "barrier"
        if now_s < computing_s:
            return "data"
        return "code" if now_s < waiting_s else "collective"

    def is_faulty(self, rank: int, kind: str) -> bool:
        fault = self.fault
        return (
            fault is not None
            and fault.kind == kind
            and rank in fault.ranks
            and fault.at_s <= asyncio.get_running_loop().time() < fault.until_s
        )

    def is_stuck(self, rank: int) -> bool:
        return self._now.wait_s[rank] == FOREVER or self._now.compute_s[rank] == FOREVER

    # -- running

    async def run(self) -> None:
        """Train until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for agent in self.agents:
                tasks.create_task(self._watch(agent))
            for number in range(REPLICAS):
                tasks.create_task(self._gossip(number))
            tasks.create_task(self._devices())
            tasks.create_task(self._keyspace())
            tasks.create_task(self._train())

    async def _watch(self, agent: _Agent) -> None:
        await asyncio.sleep(self.chance.random())  # agents do not start at the same moment
        await agent.watch.run()

    async def _gossip(self, number: int) -> None:
        await asyncio.sleep(self.chance.random() * GOSSIP_S)
        while True:
            for letter in self.boards[number].news():
                for other, board in enumerate(self.boards):
                    if other != number:
                        board.note(letter.job, letter.generation, letter.ranks, own=False)
                        for member in letter.devices:
                            board.note_devices(letter.job, member, own=False)
            await asyncio.sleep(GOSSIP_S)

    async def _devices(self) -> None:
        """Have every agent read its devices each second, so that a throttled device is reported within a second."""
        while True:
            for host, agent in enumerate(self.agents):
                first = host * self.shape.slots
                devices = [
                    DeviceStatus(
                        index=local,
                        temperature_c=60,
                        utilization_percent=97,
                        throttled="hot: hardware thermal slowdown"
                        if self.is_faulty(first + local, "throttled")
                        else "",
                    )
                    for local in range(self.shape.slots)
                ]
                member = MemberDevices(
                    worker_id=agent.worker, incarnation=self._incarnations[host], devices=devices
                )
                if not agent.frozen:
                    agent.board.note_devices(JOB, member, own=True)
            await asyncio.sleep(1.0)

    async def _keyspace(self) -> None:
        """Write the keys that agents and replicas write about ended processes."""
        await self._injected.wait()
        fault = self.fault
        if fault is None or fault.kind not in {"exited", "node lost"}:
            return
        keys = self._keys.job(JOB)
        if fault.kind == "exited":
            await asyncio.sleep(self.chance.uniform(0.05, 0.3))
            for rank in fault.ranks:
                worker = WorkerId(self.agents[rank // self.shape.slots].worker)
                self._put(
                    keys.failed_rank(GENERATION, rank),
                    RankFailed(reason="killed by signal 9", worker=worker, code=-9),
                )
        else:  # the node's connections break; then it has the grace period to reconnect
            await asyncio.sleep(self.chance.uniform(1.0, 1.8))
            for host in {rank // self.shape.slots for rank in fault.ranks}:
                self._put(keys.worker(self.agents[host].worker), None, deleted=True)

    async def _train(self) -> None:
        shape = self.shape
        while True:
            await self._one_step()
            if self.saves_next or (shape.save_every and self.made % shape.save_every == 0):
                self.saves_next = False
                await self._together("save", 0.3, 0.4)
            if shape.eval_every and self.made % shape.eval_every == 0:
                await self._together("eval", self.chance.uniform(1.0, 3.0), 0.1)

    async def _one_step(self) -> None:
        loop = asyncio.get_running_loop()
        chance, shape = self.chance, self.shape
        warm = WARM_UP[self.made] if self.made < len(WARM_UP) else 1.0
        long = math.exp(chance.gauss(0, 0.08)) * warm
        """This factor is the same for all ranks: longer sequences, for example."""
        wait_s, compute_s, pauses_s = [], [], []
        for rank in self.ranks:
            wait = shape.data_s * math.exp(chance.gauss(0, 0.3))
            work = shape.compute_s * long * rank.likes * math.exp(chance.gauss(0, shape.jitter))
            pause_s = 0.0
            if warm > 1:
                work *= chance.uniform(0.8, 1.4)
            if chance.random() < shape.pause:
                pause_s = min(0.8, chance.expovariate(1 / 0.12))
            if chance.random() < shape.hiccup:
                wait += min(0.8, chance.expovariate(1 / 0.15))
            if rank.number == 0 and self.made % 20 == 0:
                pause_s += 0.05  # this rank writes the log
            wait_s.append(wait)
            compute_s.append(work)
            pauses_s.append(pause_s)
        self._apply_fault(wait_s, compute_s)
        compute_s = [work + pause_s for work, pause_s in zip(compute_s, pauses_s, strict=True)]
        if self.undeclared_eval_s:
            compute_s = [each + self.undeclared_eval_s * chance.uniform(0.9, 1.1) for each in compute_s]
            self.undeclared_eval_s = 0.0
        self._now = _Step(loop.time(), wait_s, compute_s)
        collective_s = shape.collective_s * math.exp(chance.gauss(0, 0.2))
        if chance.random() < 0.005:
            collective_s += min(1.5, chance.expovariate(1 / 0.3))  # a delay of the network
        all_here_s = max(map(sum, zip(wait_s, compute_s, strict=True)))
        await _sleep(all_here_s + collective_s)
        self.step += 1
        self.made += 1
        for rank, wait, work in zip(self.ranks, wait_s, compute_s, strict=True):
            rank.measure(wait, work, all_here_s + collective_s - wait - work)
            rank.report(self.step, "step")

    def _apply_fault(self, wait_s: list[float], compute_s: list[float]) -> None:
        fault, now_s = self.fault, asyncio.get_running_loop().time()
        if fault is None or not fault.at_s <= now_s < fault.until_s:
            return
        for rank in fault.ranks:
            compute_s[rank] *= fault.factor
            wait_s[rank] += fault.data_s * math.exp(self.chance.gauss(0, 0.2)) if fault.data_s else 0.0
            if fault.kind in {"stuck in data", "stuck on disk"}:
                wait_s[rank] = FOREVER
            elif fault.kind in {"deadlock", "stopped", "silent", "exited", "node lost"}:
                compute_s[rank] = FOREVER

    async def _together(self, phase: str, usual_s: float, spread: float) -> None:
        """Put all ranks into another phase; each rank does its work of the phase and waits for the others."""
        loop, shape = asyncio.get_running_loop(), self.shape
        took_s = [usual_s * math.exp(self.chance.gauss(0, spread)) for _ in self.ranks]
        fault = self.fault
        if (
            fault is not None
            and fault.kind == "stuck in save"
            and phase == "save"
            and fault.at_s <= loop.time()
        ):
            for number in fault.ranks:
                took_s[number] = FOREVER
        for rank in self.ranks:
            rank.report(self.step, phase)
        self._now = _Step(loop.time(), [0.0] * shape.size, took_s, phase=phase)
        await _sleep(max(took_s))
        for rank in self.ranks:
            rank.report(self.step, "step")

    def inject(self, fault: Fault) -> None:
        """Inject a fault now."""
        self.fault = fault
        self._injected.set()

    def freeze_host(self, host: int) -> None:
        """Stop the agent of a host as well."""
        self.agents[host].frozen = True


async def _sleep(seconds: float) -> None:
    await asyncio.sleep(seconds if seconds < FOREVER else 1e6)
