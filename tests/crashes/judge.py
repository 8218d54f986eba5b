"""Checks the guarantees for storage that is opened again after a crash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strata.checkpoint.restore.verify import verify
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.kv.records import CheckpointState
from strata.errors import StrataError
from tests.crashes.program import KEPT, STEPS, state_of

AFTER = 100
SMALL_BYTES = 1000


def complaints(root: Path, printed: Sequence[str], size_bytes: int) -> Iterator[str]:
    """Yield the problems below `root`, after a process that wrote the lines `said` has died.

    A commit that was reported to the process must not be lost. A partial save must not be a checkpoint. The newest
    checkpoint must verify, and its restore must give equal bits. The next process must be able to save, and must
    delete everything that the dead process left.
    """
    reported = [int(line.split()[1]) for line in printed if line.startswith("committed ")]
    marked = sum(line == "step marked" for line in printed)
    try:
        with CheckpointManager(root, keep_count=KEPT) as manager:
            yield from _opened(manager, [*reported, *STEPS[:marked]], size_bytes)
            manager.save_state(state_of(AFTER, size_bytes), AFTER)
            manager.wait_until_finished(60)
            if manager.all_steps() != [AFTER]:
                yield f"after the next save there are the steps {manager.all_steps()}"
    except StrataError as error:
        yield f"{type(error).__name__}: {error}"
        return
    if len(left := sorted(path.name for path in root.glob("step-*"))) != 1:
        yield f"the next process left {left}"
    temporary = sorted(path.relative_to(root) for path in root.rglob(".*"))
    if left := [str(path) for path in temporary if not _is_small_object(root, path)]:
        yield f"the next process left the temporary files {left}"


def _opened(manager: CheckpointManager, known: Sequence[int], size_bytes: int) -> Iterator[str]:
    checkpoints = manager.all_checkpoints()
    for c in checkpoints:
        if c.state is not CheckpointState.COMMITTED:
            yield f"step {c.step} is {c.state.value}: {c.reason}"
            continue
        found = verify(manager._storage, manager._catalog.folder(c), manifest_digest=c.manifest_digest)
        if not found.good:
            yield f"step {c.step} does not verify: {found.problems[0]}"
    latest = manager.latest_step()
    if (latest or 0) < max(known, default=0):
        yield f"step {max(known)} was told to be committed, and the newest is {latest}"
    state: dict[str, Any] = dict.fromkeys(state_of(0, 16))
    restored = manager.restore(state)
    if (restored.step if restored is not None else None) != latest:
        yield f"the newest is {latest}, and {restored} was restored"
    elif latest is not None and not _same(state, state_of(latest, size_bytes)):
        yield f"step {latest} was restored with other values than were saved"


def _is_small_object(root: Path, temporary: Path) -> bool:
    """Return True for one of the small objects beside the checkpoints, which nothing deletes (docs/limits.md)."""
    return not temporary.parts[0].startswith("step-") and (root / temporary).stat().st_size < SMALL_BYTES


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
