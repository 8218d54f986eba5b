"""A process that saves four steps, two as Incrementals, keeps one, and dies by SIGKILL at a given step of a save.

The judging process forks this process. Through a pipe, this process reports each step of a save before it takes the
step, and each commit once it gets the commit's report. It uses the parts of which a `CheckpointManager` consists.
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
"""The two Incrementals use bytes of the first checkpoint; after the last one, retention deletes all three."""
STEPS = tuple(TYPES)
KEPT = 1
_ATTEMPT = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Die just before the nth occurrence of the step with that name, or `after_us` later."""

    step: str
    nth: int
    after_us: int | None = None


def state_of(step: int, size_bytes: int) -> dict[str, Any]:
    """Return the state at a step: an array derived from the step, an array that never changes, and the step."""
    count = size_bytes // 8
    return {
        "w": np.random.default_rng(step).random(count // 2),
        "frozen": np.random.default_rng(0).random(count - count // 2),
        "step": step,
    }


def save_and_die(root: Path, kill: Kill | None, size_bytes: int, printed: int) -> None:
    """Save every step below `root`; `said` is the file descriptor of the pipe to write to."""
    lock, counts = threading.Lock(), dict[str, int]()

    def say(event: str) -> None:
        os.write(printed, f"{event}\n".encode())

    def on_step(step: str) -> None:
        step = _ATTEMPT.sub("ATTEMPT", step)  # each process has another attempt id
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
