"""Has this process write the stacks of its threads into a file whenever its supervisor asks.

The file's name is in `STRATA_STACKS`, where `%r` stands for the rank; the question is SIGUSR2. The other side is
`strata.agent.health.stack_request`, and a warm process does the same before it runs the script.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_files: list[IO[bytes]] = []
"""Open as long as the process lives: faulthandler writes by descriptor."""


def answer_stack_dumps(environment: Mapping[str, str]) -> bool:
    """Register the answer; False where nobody will ask, or the script uses SIGUSR2 itself."""
    name = environment.get("STRATA_STACKS", "").replace("%r", environment.get("RANK", ""))
    if not name or Path(name).exists() or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return False
    # under its own name only once the handler is there: without it the signal would end the process
    announced = Path(name)
    file = announced.with_suffix(".part").open("ab")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    _files.append(file)
    announced.with_suffix(".part").rename(announced)
    return True
