"""Warm processes: interpreters that have done the script's large imports and wait to be a rank.

Importing torch takes seconds. Without warm processes, other ranks would wait that long at a restart. So a node
keeps one warm process per slot, also on a standby. Each warm process is used once. It is started with the
settings that all generations share: program, flags, arguments, inherited environment. It receives the other
settings when its rank starts. It runs the program `launch.warm.warm_program`.

In three cases the rank starts from nothing, without waiting: there is no warm process, the warm process has ended, or
it has not sent its hello (its program is not Python).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from strata.agent.environment import common_environment
from strata.launch.rank_output import RankOutput, RankOutputs
from strata.launch.warm import warm_program
from strata.launch.warm.python_command import PythonCommand, python_command, source_of
from strata.launch.warm.script_imports import Libraries, libraries_of
from strata.launch.warm.starting import ColdStarter, Started
from strata.observe import get_logger
from strata.processes.children import Child

log = get_logger()

_STRATA = ("strata.client.rank.connect", "strata.client.checkpoints.manager", "strata.training.init")
"""Modules that `import strata` does not load, and that a rank needs at its start."""

_TORCH = ("torch._dynamo",)
"""Modules that `import torch` does not load. The first optimizer imports them; this takes as long as the import
of torch.
"""


@dataclass(frozen=True, slots=True)
class _Spare:
    child: Child
    link: socket.socket
    output: RankOutput | None

    def becomes(self, line: bytes) -> bool:
        """Send the process its environment; kill it and return False unless it lives and runs `warm_program`."""
        with self.link:
            try:
                # the process may still be importing: do not wait for a line that does not fit into the socket
                lives = self.child.poll() is None and self.link.recv(1) == warm_program.HELLO
                if lives and self.link.send(line) == len(line):
                    return True
            except OSError:
                pass  # the process has not sent its hello yet, or has ended
        self.child.kill()
        return False

    def close(self) -> None:
        self.child.kill()
        self.link.close()


class WarmStarter:
    """Starts ranks from waiting processes, and from nothing if none waits."""

    def __init__(
        self,
        command: Sequence[str],
        python: PythonCommand,
        modules: Sequence[str],
        *,
        inherited: Mapping[str, str],
        outputs: RankOutputs | None = None,
    ) -> None:
        self._outputs = outputs
        self._interpreter = (python.program, *python.flags, warm_program.__file__)
        at_once = (*self._interpreter, warm_program.AT_ONCE, "", *python.target, *python.arguments)
        self._cold = ColdStarter(command if _is_script(python.program) else at_once, outputs)
        self._work = (",".join(modules), *python.target, *python.arguments)
        self._environment = common_environment(inherited)
        self._spares: list[_Spare] = []

    @classmethod
    def of(
        cls,
        command: Sequence[str],
        *,
        modules: Sequence[str],
        inherited: Mapping[str, str],
        outputs: RankOutputs | None = None,
    ) -> Self | None:
        """Return a starter for `command`; None if it is not a Python script or module.

        `modules` are imported in addition to those that the script is found to import. Without `outputs` a process
        writes to this process's output, or into its file.
        """
        python = python_command(command)
        if python is None:
            return None
        file = source_of(python)
        if python.script is not None and (file is None or zipfile.is_zipfile(file)):
            return None
        found = libraries_of(file, _root(python, file)) if file is not None else Libraries()
        if found.left_out:
            log.info("warm.imports_left_out", reason="; ".join(found.left_out), hint="--warm-import")
        names = [*found.modules, *modules]
        if any(name.partition(".")[0] == "strata" for name in names):
            names += _STRATA
        if any(name.partition(".")[0] == "torch" for name in names):
            names += _TORCH
        return cls(command, python, names, inherited=inherited, outputs=outputs)

    def start(self, environment: Mapping[str, str], *, name: str) -> Started:
        """Return a process that becomes the command in this environment."""
        line = json.dumps(dict(environment)).encode() + b"\n"
        while self._spares:
            spare = self._spares.pop(0)
            if spare.becomes(line):
                spare.child.name = name
                return Started(child=spare.child, warm=True, output=spare.output)
        return self._cold.start(environment, name=name)

    def prepare(self, count: int) -> int:
        """Make `count` processes wait, and return how many were started for that.

        A process that cannot be started does not count.
        """
        lost = [spare for spare in self._spares if spare.child.poll() is not None]
        for spare in lost:
            log.info("warm.lost", pid=spare.child.pid, reason=spare.child.describe())
            spare.close()
        self._spares = [spare for spare in self._spares if spare not in lost]
        before = len(self._spares)
        with contextlib.suppress(OSError):
            while len(self._spares) < count:
                self._spares.append(self._spare())
        return len(self._spares) - before

    def close(self) -> None:
        """End the waiting processes."""
        for spare in self._spares:
            spare.close()
        self._spares.clear()

    def _spare(self) -> _Spare:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            descriptor = theirs.fileno()
            argv = (*self._interpreter, str(descriptor), *self._work)
            output = None
            try:
                if self._outputs is not None:
                    child, output = self._outputs.start(
                        argv, name="warm", env=self._environment, pass_fds=[descriptor]
                    )
                    output.listen()
                else:
                    child = Child.start(argv, name="warm", env=self._environment, pass_fds=[descriptor])
            except OSError:
                ours.close()
                raise
        log.debug("warm.started", pid=child.pid)
        return _Spare(child, ours, output)


def uses_init(command: Sequence[str]) -> bool:
    """Tell whether `command` is a Python script or module that uses `strata.init`, as far as its source shows."""
    python = python_command(command)
    file = source_of(python) if python is not None else None
    return (
        python is not None
        and file is not None
        and libraries_of(file, _root(python, file)).supports_graceful_stop
    )


def _is_script(program: str) -> bool:
    """Tell whether the program called python is a script, which may parse its arguments unlike Python."""
    try:
        with Path(shutil.which(program) or program).open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True


def _root(python: PythonCommand, file: Path) -> Path:
    return file.resolve().parent if python.script is not None else Path()
