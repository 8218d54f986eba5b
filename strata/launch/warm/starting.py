"""Starters of rank processes: cold, from nothing, or warm (`launch.warm.warm_pool`), from a waiting interpreter."""

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
    """A process that runs the command, whether it was warm, and its output if that goes through the agent."""

    child: Child
    warm: bool
    output: RankOutput | None = None


class Starter(Protocol):
    """Starts the command of a run, once per rank. Output goes to the file named by `RANK_LOG` in its environment."""

    def start(self, environment: Mapping[str, str], *, name: str) -> Started:
        """Return a process that runs the command; `OSError` if the command cannot be run at all."""
        ...

    def prepare(self, count: int) -> int:
        """Prepare to start `count` processes soon; return how many more had to be prepared for that."""
        ...

    def close(self) -> None:
        """End the processes that were prepared and not used."""
        ...


class ColdStarter:
    """Starts each process from nothing. Without `outputs` a rank writes to this process's output, or into its file."""

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
