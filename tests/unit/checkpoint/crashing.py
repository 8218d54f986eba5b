"""Processes that save two steps, keeping one, and kill themselves at a chosen step of their way.

    python -m tests.unit.checkpoint.crashing ROOT LAST

Forks one process for each number from 0 to LAST, one after the other, each with the folder of its
number below ROOT. It dies as it is about to take the step of that number, counted from 1; 0 lives.
Each says the steps it takes, and what it was told to be committed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np

from strata.checkpoint.catalog import SaveRequest
from strata.checkpoint.local_catalog import LocalCatalog
from strata.checkpoint.local_storage import LocalStorage
from strata.checkpoint.saving import Saver
from strata.checkpoint.writer import AsyncCheckpointWriter
from strata.client.checkpoint_retention import retain

STEPS = (20, 40)
COUNT = 1_200_000
"""Numbers in the state: two chunks of them."""


def say(event: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def save_and_die(root: Path, run: int) -> None:
    taken = 0
    one_at_a_time = threading.Lock()  # an image is written by several threads

    def on_step(step: str) -> None:
        nonlocal taken
        with one_at_a_time:
            taken += 1
            say("step", run=run, name=step)
            if taken == run:
                os.kill(os.getpid(), signal.SIGKILL)

    storage = LocalStorage(root, nonce=lambda: uuid.uuid4().hex, on_step=on_step)
    catalog = LocalCatalog(
        storage, new_id=lambda: uuid.uuid4().hex, now_unix_ms=lambda: time.time_ns() // 10**6
    )
    saver = Saver(storage=storage, catalog=catalog, commit_timeout_s=20, on_step=on_step)
    writer = AsyncCheckpointWriter(saver, after_save=lambda saved: retain(catalog, storage, 1))
    for step in STEPS:
        state = {"w": np.full(COUNT, float(step)), "step": step}
        writer.write(state, SaveRequest(step=step)).wait()
        say("committed", run=run, step=step)
        writer.wait_until_finished()
    writer.close()


def main() -> None:
    root, last = Path(sys.argv[1]), int(sys.argv[2])
    for run in range(last + 1):
        child = os.fork()
        if child == 0:
            save_and_die(root / str(run), run)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        say("ended", run=run, code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
