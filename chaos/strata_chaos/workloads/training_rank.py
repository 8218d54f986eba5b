"""One rank of the training workload: restores, passes a barrier at every step, saves every few steps."""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import time
from pathlib import Path
from typing import Final

import strata
from strata.client import RankClient
from strata.data.sampler import ElasticSampler
from strata.errors import BarrierTimeout, StrataError, Unavailable
from strata_chaos.history import HistoryWriter
from strata_chaos.workloads import checkpoints
from strata_chaos.workloads.program import Options, Stop, boottime_s
from strata_chaos.workloads.recording import Recorder

HISTORY: Final = "CHAOS_HISTORY"
"""Environment variable with the path of the node's history file."""
STEP_S: Final = 0.05
TIMEOUT_S: Final = 20.0
EPOCH: Final = 192
"""Samples in an epoch, a multiple of `BATCH`."""
BATCH: Final = 8
"""Samples in a step, over all ranks."""


def train(options: Options, recorder: Recorder, rank: RankClient) -> None:
    """Train until the agent ends this process, which it does when the generation is over."""
    stop = Stop()
    with checkpoints.managed(options, rank) as manager:
        step, data = checkpoints.restore(options, recorder, manager, rank)
        used = int(json.loads(data.partition(b"\n")[0])["used"]) if data else 0
        while True:
            time.sleep(STEP_S)
            step += 1
            rank.progress(step, "train")
            meet(options, recorder, rank, step)
            used = take(options, recorder, rank, step, used)
            if step % checkpoints.STEPS == 0:
                checkpoints.save(options, recorder, stop, manager, rank, step, used=used)


def take(options: Options, recorder: Recorder, rank: RankClient, step: int, used: int) -> int:
    """Record this rank's samples of the step that follows `used` samples; return the count of used samples after it."""
    sampler = ElasticSampler(EPOCH, global_batch=BATCH, seed=options.seed)
    epoch, done = divmod(used, EPOCH)
    samples = next(sampler.indices(epoch, rank.rank, rank.world_size, done=done))
    recorder.note(
        "training.step",
        job=options.job,
        uid=rank.uid,
        generation=rank.generation,
        rank=rank.rank,
        step=step,
        epoch=epoch,
        length=EPOCH,
        samples=samples,
    )
    return used + BATCH


def meet(options: Options, recorder: Recorder, rank: RankClient, step: int) -> None:
    """Pass the step's barrier: retry the round while its outcome is unknown; after a timeout start a new round."""
    tries = 1
    while True:
        payload = f"{rank.uid}/{rank.generation}/{step}/{rank.rank}/{os.getpid()}/{tries}".encode()
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
                index=step,
                name="step",
                ranks=list(range(rank.world_size)),
                payload=base64.b64encode(payload).decode(),
            ) as running:
                got = rank.barrier("step", payload, timeout_s=TIMEOUT_S)
                running.result["payloads"] = {
                    str(of): base64.b64encode(brought).decode() for of, brought in sorted(got.items())
                }
            return
        except Unavailable:
            continue
        except BarrierTimeout:
            tries += 1  # the round timed out: the next call arrives at a new round


def main() -> int:
    """Run as the rank that the environment names; exit code 1 on any error of Strata."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True, type=Path)
    parser.add_argument("--seed", required=True, type=int)
    given = parser.parse_args()
    history = Path(os.environ[HISTORY])
    path = history.with_name(f"{history.stem}.{os.getpid()}.jsonl")
    with HistoryWriter(path) as writer:
        recorder = Recorder(writer, client=f"training.{os.environ.get('RANK', '')}", clock=boottime_s)
        recorder.started("rank", worker=os.environ.get("STRATA_WORKER_ID", ""))
        try:
            with strata.connect() as rank:
                options = Options(
                    endpoints="",
                    job=rank.job,
                    history=path,
                    seed=given.seed,
                    clients=rank.world_size,
                    storage=given.storage,
                )
                train(options, recorder, rank)
        except StrataError as error:
            recorder.note("client.failed", type=type(error).__name__, message=error.message)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
