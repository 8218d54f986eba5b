"""How a rank's process comes to be: started from nothing, or (`launch.warm.warm_pool`) from one that waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from strata.launch.rank_output import RankOutput, RankOutputs
from strata.processes.children import Child

RANK_LOG: Final = "STRATA_RANK_LOG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A process that runs the command, whether it had imported before, and its output if that is passed on."""

    child: Child
    warm: bool
    output: RankOutput | None = None


class Starter(Protocol):
    """Starts the command of a run, once for each rank. Output goes to the file that `RANK_LOG` of its environment names."""

    def start(self, environment: Mapping[str, str], *, name: str) -> Started:
        """Return the process that runs the command; `OSError` when it cannot be run at all."""
        ...

    def prepare(self, count: int) -> int:
        """Get ready to start so many processes soon; return how many more had to be made ready for that."""
        ...

    def close(self) -> None:
        """End what was prepared and not used."""
        ...


class ColdStarter:
    """Starts each process from nothing. Without `outputs` it writes where this process does, or into its file."""

    def __init__(self, command: Sequence[str], outputs: RankOutputs | None = None) -> None:
        self._command = tuple(command)
        self._outputs = outputs

    def start(self, environment: Mapping[str, str], *, name: str) -> Started:
        if self._outputs is not None:
            child, output = self._outputs.start(self._command, name=name, env=environment)
            return Started(child=child, warm=False, output=output)
        log = environment.get(RANK_LOG)
        child = Child.start(self._command, name=name, env=environment, log=Path(log) if log else None)
        return Started(child=child, warm=False)

    def prepare(self, count: int) -> int:
        """Nothing can be prepared."""
        return 0

    def close(self) -> None:
        """Nothing was prepared."""
