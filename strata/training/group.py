"""Torch's process group: initialised if the program has imported torch and has no group yet.

Under `strata run` and torchrun the environment gives the rendezvous address (`env://`). For standalone processes,
rank 0 opens a TCPStore on a free port, and sends its address to the other ranks in the payload of a barrier. Each
generation has a new store, since a used store has stale keys.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from strata.errors import BarrierTimeout, Unavailable
from strata.training.rank_context import RankContext
from strata.transport import name_lookup

MEETING: Final = "strata.group"
MEETING_S: Final = 300.0
JOIN: Final = "join"
"""The phase of a rank that waits for the others."""
MEETINGS: Final = 4
"""How many times a rank enters the barrier: if storage refuses a rank's start, that rank may be `save_grace_s` late."""

log: Final = logging.getLogger("strata.training")


def ensure_group(context: RankContext, *, arm: Callable[[], None]) -> bool:
    """Initialise torch's process group unless there is one, or torch is not imported.

    Returns whether this call initialised a group; the caller must then end the group. `arm` is called before this
    process meets the others in a store, since the meeting binds the process to its generation.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return False
    if torch.distributed.is_initialized():
        arm()
        return False
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    context.progress(0, JOIN)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        arm()
        torch.distributed.init_process_group(backend)
        return True
    store = _store(torch, context)
    arm()
    torch.distributed.init_process_group(
        backend, store=store, rank=context.rank, world_size=context.world_size
    )
    return True


def end_group() -> None:
    """Destroy the process group, if there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def abort_group() -> None:
    """Abort the collectives under way, if the backend supports it, so that threads waiting in them return."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    try:
        torch.distributed.group.WORLD.abort()
    except (AttributeError, RuntimeError) as error:
        log.info("the process group cannot be aborted: %s", error)


def _store(torch: Any, context: RankContext) -> Any:
    """Return the torch store that all ranks of this generation share."""
    if context.world_size == 1:
        return torch.distributed.HashStore()
    limit = timedelta(seconds=MEETING_S)
    store, offer = None, b""
    if context.rank == 0:
        address = _own_address()
        name_lookup.warn_if_slow(address, log.warning)
        store = torch.distributed.TCPStore(
            address, 0, context.world_size, is_master=True, wait_for_workers=False, timeout=limit
        )
        offer = json.dumps([address, store.port]).encode()
    answer = meet(context, offer).get(0)
    if answer is None:
        raise Unavailable("rank 0 sent no address for the process group")
    if store is None:
        address, port = json.loads(answer)
        store = torch.distributed.TCPStore(
            address, port, context.world_size, is_master=False, wait_for_workers=False, timeout=limit
        )
    return store


def meet(context: RankContext, offer: bytes) -> dict[int, bytes]:
    """Return the payloads of all ranks at the meeting barrier; waits for late ranks, raises if a rank is lost."""
    for meeting in range(1, MEETINGS + 1):
        try:
            return context.barrier(MEETING, offer, timeout_s=MEETING_S)
        except BarrierTimeout as error:
            if meeting == MEETINGS:
                raise
            log.warning("waiting for late ranks: %s", error.message)
    raise AssertionError


def _own_address() -> str:
    """Return this host's address on its route to the coordinators; other hosts can reach this address too."""
    endpoint = os.environ.get("STRATA_ENDPOINTS", "").split(",")[0]
    host = endpoint.rpartition("://")[2].rpartition(":")[0].strip("[]")
    try:
        where = socket.getaddrinfo(host or "localhost", 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(where[0], socket.SOCK_DGRAM) as probe:
            probe.connect(where[4])
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
