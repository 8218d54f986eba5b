"""NCCL's flight recorder: the last collectives of a rank, written to a file when the rank stalls.

torch keeps the last collectives of each process group in a ring. torch writes the ring to a file when torch's
own watchdog gives up, or when another process writes to the rank's named pipe. Environment variables name the
file and the pipe, and both names end in the rank's number. The file stays on the rank's host: it may be large.
It is a pickle, so Strata never reads it. People read it with `torchfrtrace`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FILE_VARIABLES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The second is the older name, which torch still reads."""
PIPE_VARIABLE: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_SIZE_VARIABLES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMP_VARIABLE: Final = "TORCH_NCCL_DUMP_ON_TIMEOUT"
ENTRIES: Final = "2000"
"""Number of collectives that are remembered: torch's own recommendation, a few MB a process."""

LIMIT_S: Final = 5.0
"""How long to wait for the file after the write to the pipe: torch polls the pipe about once a second."""
_STEP_S: Final = 0.1
_QUIET_STEPS: Final = 3


def trace_environment(folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make ranks record; variables that the user has set stay unchanged."""
    chosen = next((inherited[name] for name in FILE_VARIABLES if inherited.get(name)), "")
    stem = chosen or str(folder / "nccl_trace_rank_")
    variables = dict.fromkeys(FILE_VARIABLES, stem)
    variables |= dict.fromkeys(_SIZE_VARIABLES, ENTRIES)
    variables |= {PIPE_VARIABLE: str(folder / "nccl_pipe_rank_"), _DUMP_VARIABLE: "1"}
    return {name: value for name, value in variables.items() if not inherited.get(name)}


async def collect_trace(
    environment: Mapping[str, str], rank: int, *, limit_s: float = LIMIT_S
) -> tuple[Path, int] | None:
    """Have a rank write its recording; return the file and its size, or None if the rank wrote no file.

    A file that the rank wrote earlier, when torch's watchdog gave up, is accepted too.
    """
    stem = next((environment[name] for name in FILE_VARIABLES if environment.get(name)), "")
    if not stem:
        return None
    file = Path(f"{stem}{rank}")
    before = _stamp(file)
    if _request_dump(Path(f"{environment.get(PIPE_VARIABLE, '')}{rank}.pipe")):
        quiet, last = 0, before
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while last == before or quiet < _QUIET_STEPS:
                    await asyncio.sleep(_STEP_S)
                    now = _stamp(file)
                    quiet = quiet + 1 if now == last else 0
                    last = now
    found = _stamp(file)
    return (file, found[1]) if found is not None and found[1] > 0 else None


def _request_dump(pipe: Path) -> bool:
    """Write into the pipe if a process reads it; never block, and never create a plain file."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no such pipe, or no process has it open
        return False
    try:
        os.write(descriptor, b"1")
    except OSError:  # the pipe is full: an earlier request was not read
        return False
    finally:
        os.close(descriptor)
    return True


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return when the file was last written and its size; None if there is no file."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
