"""Joining as a standalone process: a client joins, and joins again whenever its session ends."""

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
    """Return this client's place in the world, as the fields of a history record."""
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
    """Join until the client has a place in a world, and return the place; None if `stop` is set first.

    `once`: also return None if the join is refused because another process with this id lives. `min_workers` creates
    the job again if a rebuild of the control plane could not recover it; the default is the number of clients.
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
    """Wait for a place in a newer world and return True. Return False if the session ends first."""
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
    """Leave the job, which ends the generation for the other members."""
    with recorder.operation(
        "member.leave",
        announce=True,
        worker=options.worker,
        job=options.job,
        incarnation=client.incarnation,
        pid=os.getpid(),
    ):
        client.close(code=1, reason="leaves")
