"""The context of a process, from its environment and torch: its rank's session, the world size, ids, the time."""

from __future__ import annotations

import os
import sys
import time
import uuid
from typing import Any


def session_of_rank() -> Any:
    """Return the session of the rank that the environment names."""
    from strata.client.rank.connect import connect  # noqa: PLC0415  # imports grpc

    return connect()


def world_size_elsewhere() -> int:
    """Return the number of processes that train together, as torch or the environment reports it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1


def random_id() -> str:
    """Return a new id, for an attempt or a temporary file's name."""
    return uuid.uuid4().hex


def now_unix_ms() -> int:
    """Return the time of this host's clock."""
    return time.time_ns() // 1_000_000
