"""Dump the stacks of this process's threads into a file on request of its agent.

`STRATA_STACKS` has the file's name, in which `%r` stands for the rank. The request is SIGUSR2; the agent's side
is `strata.agent.health.stack_request`. A warm process (started in advance) registers the handler before it runs the
script.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_files: list[IO[bytes]] = []
"""These files stay open as long as the process lives: faulthandler writes to their descriptors."""


def answer_stack_dumps(environment: Mapping[str, str]) -> bool:
    """Register the signal handler; return False if no agent will request a dump or the script uses SIGUSR2 itself."""
    name = environment.get("STRATA_STACKS", "").replace("%r", environment.get("RANK", ""))
    if not name or Path(name).exists() or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return False
    # the agent signals only if the file exists, so give it this name last: without a handler the signal would end the
    # process
    announced = Path(name)
    file = announced.with_suffix(".part").open("ab")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    _files.append(file)
    announced.with_suffix(".part").rename(announced)
    return True
