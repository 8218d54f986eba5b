"""The checkpoints workload: K members save real files together and restore them; readers poll `latest`.

The data of a save begin with rank and step, followed by bytes that depend on seed, generation, step, rank and
process. The history has only the sha256 of the data, and a checker compares the sha256 of restored data with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Final

from strata import CheckpointManager, CoordinatorClient
from strata.client import RankClient
from strata.errors import CheckpointNotFound, StaleGeneration, StrataError, Unavailable
from strata_chaos.workloads import joining
from strata_chaos.workloads.program import Options, Stop, Workload, main
from strata_chaos.workloads.recording import Recorder

STEPS: Final = 10
PAUSE_S: Final = 0.1
COMMIT_S: Final = 20.0
READ_S: Final = 0.3
KEEP: Final = 3


def client(options: Options, recorder: Recorder, stop: Stop) -> None:
    """Save and restore as a member; an extra client reads `latest`."""
    if not options.is_member:
        read(options, recorder, stop)
        return
    while not stop.is_set():
        rank = joining.join(options, recorder, stop)
        if rank is None:
            return
        going = True
        while going and not stop.is_set():
            try:
                train(options, recorder, stop, rank)
            except StaleGeneration:
                going = joining.rejoin(options, recorder, stop, rank)
            except StrataError as error:
                recorder.note("generation.ended", error=type(error).__name__, message=error.message)
                going = newer(stop, rank) and joining.rejoin(options, recorder, stop, rank)


def newer(stop: Stop, rank: RankClient) -> bool:
    """Wait until the generation, which can save no more, is over; return False if the session ends first."""
    while not stop.wait(PAUSE_S):
        try:
            rank.check()
        except StaleGeneration:
            return True
        except StrataError:
            return False
    return False


def train(options: Options, recorder: Recorder, stop: Stop, rank: RankClient) -> None:
    """Restore the checkpoint that this generation starts from, then save one step after another."""
    with managed(options, rank) as manager:
        step, _data = restore(options, recorder, manager, rank)
        while not stop.wait(PAUSE_S):
            rank.check()
            step += STEPS
            save(options, recorder, stop, manager, rank, step)


@contextlib.contextmanager
def managed(options: Options, rank: RankClient) -> Iterator[CheckpointManager]:
    """Open a manager. Ignore the errors of its last saves: the history already has them."""
    manager = CheckpointManager(
        options.storage,
        client=rank,
        keep_count=KEEP,
        capture_rng=False,
        commit_timeout_s=COMMIT_S,
        save_wait_s=COMMIT_S,
    )
    try:
        yield manager
    finally:
        with contextlib.suppress(StrataError):  # the save itself has recorded the error
            manager.close()


def restore(
    options: Options, recorder: Recorder, manager: CheckpointManager, rank: RankClient
) -> tuple[int, bytes]:
    """Load this world's starting point; return its step and the data of this rank, or 0 and b"" if there is none."""
    point = rank.restore_point
    begin = None
    if point is not None:
        begin = {
            "step": point.step,
            "attempt": point.attempt,
            "record_generation": point.record_generation,
        }
    with recorder.operation(
        "checkpoint.restore",
        job=options.job,
        worker=options.worker,
        uid=rank.uid,
        generation=rank.generation,
        rank=rank.rank,
        point=begin,
    ) as running:
        try:
            data = manager.load_bytes()
        except CheckpointNotFound:
            if point is not None:
                raise
            running.result["step"] = None
            return 0, b""
        running.result.update(step=point.step if point is not None else None, digest=digest(data))
    return (point.step, data) if point is not None else (0, b"")


def content(options: Options, rank: RankClient, step: int, **more: int) -> bytes:
    """Return the data of this rank at this step. The first line is a JSON document that includes `more`."""
    head = {"job": options.job, "worker": options.worker, "pid": os.getpid(), "step": step}
    head |= {"generation": rank.generation, "rank": rank.rank, **more}
    rng = options.rng("content", rank.generation, step, rank.rank, os.getpid())
    return json.dumps(head).encode() + b"\n" + rng.randbytes(rng.randrange(1_000, 300_000))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def save(
    options: Options,
    recorder: Recorder,
    stop: Stop,
    manager: CheckpointManager,
    rank: RankClient,
    step: int,
    **more: int,
) -> None:
    """Save one step, with `more` in its document; record every result, and raise only `StaleGeneration`."""
    data = content(options, rank, step, **more)
    try:
        with recorder.operation(
            "checkpoint.save",
            announce=True,
            job=options.job,
            worker=options.worker,
            incarnation=rank.incarnation,
            uid=rank.uid,
            generation=rank.generation,
            rank=rank.rank,
            step=step,
            digest=digest(data),
            size_bytes=len(data),
        ) as running:
            info = manager.save(data, step=step)
            running.result["staged_t"] = recorder.clock()
            while not stop.is_set():
                try:
                    info.wait(1.0)
                    break
                except Unavailable:
                    if info.done:
                        raise
            running.result.update(committed=info.committed, attempt=info.id, path=info.path)
    except StaleGeneration:
        raise
    except StrataError:
        return


def read(options: Options, recorder: Recorder, stop: Stop) -> None:
    """Read the latest checkpoint repeatedly: its step must never decrease."""
    with CoordinatorClient.connect(options.endpoints, job=options.job, timeout_s=5.0) as cluster:
        while not stop.wait(READ_S):
            try:
                with recorder.operation("checkpoint.latest", job=options.job) as running:
                    found = cluster.latest_checkpoint()
                    running.result.update(step=found.step, generation=found.generation, attempt=found.attempt)
            except StrataError:
                continue


WORKLOAD: Final = Workload(name="checkpoints", clients=3, extra=1, client=client)

if __name__ == "__main__":
    sys.exit(main(WORKLOAD))
