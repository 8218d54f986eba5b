"""The barriers workload: K members of a world pass one barrier round after another, with payloads.

All ranks of a generation follow one plan, determined by seed and generation. It has rounds of all ranks, rounds of a
subset of the ranks, rounds with a slow member, and rounds whose deadline is too short for the slow member. A payload
names its rank and its step of the plan, so it is unique in the whole run.
"""

from __future__ import annotations

import base64
import os
import sys
from dataclasses import dataclass
from typing import Final

from strata.client import RankClient
from strata.errors import BarrierBroken, BarrierTimeout, StaleGeneration, StrataError, Unavailable
from strata_chaos.workloads import joining
from strata_chaos.workloads.program import Options, Stop, Workload, main
from strata_chaos.workloads.recording import Recorder

PAUSE_S: Final = 0.02
SLOW_S: Final = 0.4
BUSY_POLL_S: Final = 0.25
"""Deadline of a round whose slow member always misses it."""
GRACE_S: Final = 20.0
BROKEN_WAIT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One round of the plan, the same in every rank."""

    name: str
    ranks: tuple[int, ...]
    slow: int | None
    timeout_s: float


def step_of(options: Options, generation: int, index: int, world_size: int) -> Step:
    """Return step `index` of this generation's plan."""
    rng = options.rng("step", generation, index)
    everybody = tuple(range(world_size))
    kind = rng.random()
    slow = rng.randrange(world_size)
    if kind < 0.2 and world_size > 2:
        ranks = tuple(sorted(rng.sample(everybody, rng.randrange(2, world_size))))
        return Step(name="some-" + "-".join(map(str, ranks)), ranks=ranks, slow=None, timeout_s=GRACE_S)
    if kind < 0.3:
        return Step(name="slow", ranks=everybody, slow=slow, timeout_s=GRACE_S)
    if kind < 0.35:
        return Step(name="short-deadline", ranks=everybody, slow=slow, timeout_s=BUSY_POLL_S)
    return Step(name="all", ranks=everybody, slow=None, timeout_s=GRACE_S)


def client(options: Options, recorder: Recorder, stop: Stop) -> None:
    """Join, and pass the rounds of one generation after another."""
    while not stop.is_set():
        rank = joining.join(options, recorder, stop)
        if rank is None:
            return
        going = True
        while going and not stop.is_set():
            try:
                hold_rounds(options, recorder, stop, rank)
            except StaleGeneration:
                going = joining.rejoin(options, recorder, stop, rank)
            except StrataError:
                going = False  # the session cannot be resumed: start a new session


def hold_rounds(options: Options, recorder: Recorder, stop: Stop, rank: RankClient) -> None:
    """Pass the rounds of this generation until it is stale or the session has ended."""
    index = 0
    while not stop.wait(PAUSE_S):
        index += 1
        step = step_of(options, rank.generation, index, rank.world_size)
        if rank.rank not in step.ranks:
            rank.check()
            continue
        if step.slow == rank.rank:
            stop.wait(SLOW_S)
        payload = f"{rank.uid}/{rank.generation}/{index}/{rank.rank}/{os.getpid()}".encode()
        if hold(options, recorder, stop, rank, step, index, payload) is None:
            await_newer_world(stop, rank)


def hold(
    options: Options,
    recorder: Recorder,
    stop: Stop,
    rank: RankClient,
    step: Step,
    index: int,
    payload: bytes,
) -> bool | None:
    """Arrive until the outcome is known: True for released, False for timed out, None for broken by a death."""
    while not stop.is_set():
        try:
            with recorder.operation(
                "barrier",
                announce=True,
                job=options.job,
                worker=options.worker,
                incarnation=rank.incarnation,
                uid=rank.uid,
                generation=rank.generation,
                rank=rank.rank,
                index=index,
                name=step.name,
                ranks=list(step.ranks),
                payload=base64.b64encode(payload).decode(),
            ) as running:
                got = rank.barrier(step.name, payload, ranks=step.ranks, timeout_s=step.timeout_s)
                running.result["payloads"] = {
                    str(of): base64.b64encode(brought).decode() for of, brought in sorted(got.items())
                }
            return True
        except BarrierTimeout:
            return False
        except BarrierBroken:
            return None
        except Unavailable:
            rank.check()  # raises if the generation or session has ended; otherwise retry the same round
    return False


def await_newer_world(stop: Stop, rank: RankClient) -> None:
    """Wait for a while; raise this generation's error if it has one by then."""
    for _ in range(int(BROKEN_WAIT_S / PAUSE_S)):
        rank.check()
        if stop.wait(PAUSE_S):
            return


WORKLOAD: Final = Workload(name="barriers", clients=4, client=client)

if __name__ == "__main__":
    sys.exit(main(WORKLOAD))
