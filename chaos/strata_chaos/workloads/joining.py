"""A client as a standalone process: it joins, and joins again after whatever ended its session."""

from __future__ import annotations

import os
from functools import partial
from typing import Final

import strata
from strata.client import RankClient
from strata.errors import Refused, StrataError, Unavailable
from strata_chaos.workloads.program import Options, Stop
from strata_chaos.workloads.recording import Recorder

JOIN_S: Final = 20.0
PAUSE_S: Final = 0.2


def placed(client: RankClient) -> dict[str, object]:
    """Return which place this client has, as histories say it."""
    return {
        "incarnation": client.incarnation,
        "generation": client.generation,
        "rank": client.rank,
        "world_size": client.world_size,
        "uid": client.uid,
    }


def join(
    options: Options, recorder: Recorder, stop: Stop, *, once: bool = False, min_workers: int | None = None
) -> RankClient | None:
    """Return a client with a place in a world, however long that takes; None when told to stop.

    `once`: also None when it is refused, because another process of this name lives. `min_workers` is for a job that a
    rebuild could not know of; by default as many as there are clients.
    """
    while not stop.is_set():
        try:
            with recorder.operation(
                "member.join", announce=True, worker=options.worker, job=options.job, pid=os.getpid()
            ) as running:
                client = strata.connect(
                    options.endpoints,
                    job=options.job,
                    worker_id=options.worker,
                    min_workers=options.clients if min_workers is None else min_workers,
                    max_workers=options.clients,
                    timeout_s=JOIN_S,
                )
                running.result.update(placed(client))
        except StrataError as error:
            if once and isinstance(error, Refused):
                return None
            stop.wait(PAUSE_S)
        else:
            stop.at_end(partial(leave, options, recorder, client))
            return client
    return None


def rejoin(options: Options, recorder: Recorder, stop: Stop, client: RankClient) -> bool:
    """Wait until this client has a place in a newer world; False when its session is over instead."""
    while not stop.is_set():
        try:
            with recorder.operation(
                "member.rejoin", worker=options.worker, job=options.job, after=client.generation
            ) as running:
                client.rejoin(timeout_s=5.0)
                running.result.update(placed(client))
            return True
        except Unavailable:
            continue
        except StrataError:
            return False
    return False


def leave(options: Options, recorder: Recorder, client: RankClient) -> None:
    """End the membership on purpose, which ends the generation for the others."""
    with recorder.operation(
        "member.leave",
        announce=True,
        worker=options.worker,
        job=options.job,
        incarnation=client.incarnation,
        pid=os.getpid(),
    ):
        client.close(code=1, reason="leaves")
