"""Reading dumps of a rank's stacks: the function in which its main thread is, and the purpose of that function.

faulthandler writes the newest thread first, so the main thread is the last one. Within each thread, the
innermost call is first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

DATA: Final = "data"
"""The rank waits for its data loader."""
COLLECTIVE: Final = "collective"
"""The rank waits for other ranks: in a collective of torch, or at a barrier of Strata."""
STORAGE: Final = "storage"
"""The rank writes or reads a checkpoint."""
CODE: Final = "code"
"""Anything else."""
ACTIVITIES: Final = frozenset({DATA, COLLECTIVE, STORAGE, CODE})

_FRAME: Final = re.compile(r'\s*File "(?P<file>[^"]*)", line \d+ in (?P<function>.+)$')
_PYTHONS_OWN: Final = re.compile(r"/python3(\.\d+)?/(?!(site|dist)-packages/)")
_COLLECTIVES: Final = re.compile(r"/torch/distributed/(?!checkpoint/)|/jax/experimental/multihost_utils\.py$")
_BARRIERS: Final = re.compile(r"/strata/client/(event_loop|rank/(rank_client|barriers))\.py$")
_SAVES: Final = re.compile(
    r"/strata/(checkpoint|client/checkpoints|training/save)/|/torch/distributed/checkpoint/"
)
_LOADERS: Final = re.compile(r"/torch/utils/data/")


def innermost(stack: str) -> str:
    """Return the main thread's innermost function as `function (file)`; "" if unknown.

    Frames of Python's own library are skipped: any wait ends in `threading` or `selectors`.
    """
    frames = _main_thread(stack)
    own = [frame for frame in frames if not _PYTHONS_OWN.search(frame[0])]
    for file, function in own or frames:
        return f"{function} ({file.rpartition('/')[2]})"
    return ""


def activity(stack: str) -> str:
    """Return what the main thread does: one of `ACTIVITIES`; "" if unknown.

    A rank inside a collective waits for others, whatever function called the collective. `run.steps` waits for a
    batch in `ComputeTimer.waiting`, which is on the stack only until the loader has returned the batch.
    """
    frames = [frame for frame in _main_thread(stack) if not _PYTHONS_OWN.search(frame[0])]
    if not frames:
        return ""
    if _COLLECTIVES.search(frames[0][0]) or _is_barrier(frames):
        return COLLECTIVE
    for file, function in frames:
        if _LOADERS.search(file) or (function == "waiting" and file.endswith("/compute_timer.py")):
            return DATA
        if _SAVES.search(file):
            return STORAGE
    return CODE


def _is_barrier(frames: list[tuple[str, str]]) -> bool:
    """Return whether the main thread waits in `RankClient.barrier`, or in a function that it calls."""
    for file, function in frames:
        if not _BARRIERS.search(file):
            return False
        if function == "barrier":
            return True
    return False


def _main_thread(stack: str) -> list[tuple[str, str]]:
    """Return (file, function) of each frame of the main thread, innermost first."""
    frames: list[tuple[str, str]] = []
    for line in stack.splitlines():
        if line.rstrip().endswith("(most recent call first):"):
            frames = []
        elif match := _FRAME.match(line):
            frames.append((match["file"], match["function"]))
    return frames


def shortened(stack: str, limit: int) -> str:
    """Return a dump of stacks in at most `limit` characters: its first and last lines.

    These are more useful than the middle: they show the newest thread and the main thread.
    """
    if len(stack) <= limit:
        return stack
    lines, cut = stack.splitlines(), "  …"
    head, tail = _fitting(lines, limit // 3), _fitting(reversed(lines), limit - limit // 3 - len(cut) - 2)
    return "\n".join([*head, cut, *reversed(tail)])


def _fitting(lines: Iterable[str], limit: int) -> list[str]:
    taken: list[str] = []
    for line in lines:
        limit -= len(line) + 1
        if limit < 0:
            break
        taken.append(line)
    return taken
