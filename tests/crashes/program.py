"""A process that saves four steps, two of them as Incrementals, keeping one, and dies by SIGKILL where it is told to.

It is forked from the process that judges it, says each step that it takes and each commit that it
was told of through a pipe, and takes its way with the same parts that a `CheckpointManager` has.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import SaveRequest
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.save.writer import AsyncCheckpointWriter
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.client.checkpoints.retention import retain
from strata.core.checkpoints.references import Keep
from strata.core.kv.records import CheckpointType

TYPES = {
    20: CheckpointType.FULL,
    40: CheckpointType.INCREMENTAL,
    60: CheckpointType.INCREMENTAL,
    80: CheckpointType.FULL,
}
"""The second and the third use what the first has written; the last lets all three go."""
STEPS = tuple(TYPES)
KEPT = 1
_ATTEMPT = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Die when the step of that name is about to be taken for the nth time, or so much later."""

    step: str
    nth: int
    after_us: int | None = None


def state_of(step: int, size_bytes: int) -> dict[str, Any]:
    """Return the state at a step: numbers that follow from it, some that never change, the step."""
    count = size_bytes // 8
    return {
        "w": np.random.default_rng(step).random(count // 2),
        "frozen": np.random.default_rng(0).random(count - count // 2),
        "step": step,
    }


def save_and_die(root: Path, kill: Kill | None, size_bytes: int, said: int) -> None:
    """Save every step below `root`; `said` is the pipe's end to write to."""
    lock, counts = threading.Lock(), dict[str, int]()

    def say(event: str) -> None:
        os.write(said, f"{event}\n".encode())

    def on_step(step: str) -> None:
        step = _ATTEMPT.sub("ATTEMPT", step)  # whose id is another in each process
        with lock:
            counts[step] = counts.get(step, 0) + 1
            say(f"step {step}")
            if kill is None or (step, counts[step]) != (kill.step, kill.nth):
                return
            if kill.after_us is None:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=_die_later, args=(kill.after_us,), daemon=True).start()

    storage = LocalStorage(root, nonce=lambda: uuid.uuid4().hex, on_step=on_step)
    catalog = LocalCatalog(
        storage, new_id=lambda: uuid.uuid4().hex, now_unix_ms=lambda: time.time_ns() // 10**6
    )
    saver = Saver(storage=storage, catalog=catalog, commit_timeout_s=20, on_step=on_step)
    writer = AsyncCheckpointWriter(
        saver, after_save=lambda saved: retain(catalog, storage, Keep(latest=KEPT), now_unix_ms=0)
    )
    for step in STEPS:
        writer.write(state_of(step, size_bytes), SaveRequest(step=step, type=TYPES[step])).wait()
        say(f"committed {step}")
        writer.wait_until_finished()
    writer.close()


def _die_later(after_us: int) -> None:
    time.sleep(after_us / 1e6)
    os.kill(os.getpid(), signal.SIGKILL)
