"""The command of a run: checked before the node joins, compared between members, and used to name a job.

All members of one job run one command. The compared program is the absolute path of the script, with symbolic
links unresolved: Kubernetes mounts one script under another real path in every pod. The interpreter, its flags,
and the folder of a program found on PATH are not compared: nodes may differ in them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from strata.errors import ConfigError
from strata.launch.warm.python_command import PythonCommand, python_command, source_of
from strata.v1.members_pb2 import Command

MAX_SHOWN: Final = 300
"""Number of characters of the arguments shown to people; all of them are compared."""
_NAME_CHARS: Final = 100


def check_command(command: Sequence[str]) -> None:
    """Raise `ConfigError` for a program or script that cannot be run, before other nodes wait for this node."""
    program = command[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"there is no program {program!r} to run",
            hint="the command after -- must be an executable file or a program on PATH",
        )
    python = python_command(command)
    if python is None or python.script is None:
        return
    script = Path(python.script)
    file = script / "__main__.py" if script.is_dir() else script
    if not file.exists():
        raise ConfigError(
            f"there is no script {str(file)!r} in {Path.cwd()}",
            hint="give its path from the folder in which strata run is started",
        )
    if not os.access(file, os.R_OK):
        raise ConfigError(f"the script {str(file)!r} cannot be read", hint="see its permissions: ls -l")


def describe(command: Sequence[str]) -> Command:
    """Return the command in the form that other members of its job compare."""
    program, arguments, _script = _split(command)
    digest = hashlib.sha256(b"\0".join(os.fsencode(word) for word in arguments)).hexdigest()
    shown = shlex.join(arguments).encode(errors="replace").decode()
    if len(shown) > MAX_SHOWN:
        shown = f"{shown[: MAX_SHOWN - 1]}…"
    return Command(
        program=program.encode(errors="replace").decode(), arguments=shown, arguments_digest=digest
    )


def job_name(command: Sequence[str], *, host: str) -> str:
    """Return a job name for a run that was given none: the script's name, and a digest of host and path.

    Without a script, the digest covers the host and all words of the command.
    """
    program, arguments, script = _split(command)
    whole = (host, program) if script else (host, program, *arguments)
    digest = hashlib.sha256(b"\0".join(os.fsencode(word) for word in whole)).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script or command[0]).stem)[:_NAME_CHARS].strip("._-")
    return f"{stem or 'job'}-{digest[:6]}"


def _split(command: Sequence[str]) -> tuple[str, tuple[str, ...], str]:
    """Return the program, its arguments, and the path of its script, or "" if it has no script."""
    python = python_command(command)
    if python is not None:
        return _python(python)
    program, *words = command
    if os.sep in program:
        program = script = _absolute(program)
        return program, tuple(words), script
    if words and not words[0].startswith("-") and Path(words[0]).is_file():  # bash train.sh
        script = _absolute(words[0])
        return f"{program} {script}", tuple(words[1:]), script
    return program, tuple(words), ""


def _python(python: PythonCommand) -> tuple[str, tuple[str, ...], str]:
    if python.script is not None:
        script = _absolute(python.script)
        return script, python.arguments, script
    source = source_of(python)
    if source is None:  # an installed module
        return f"python -m {python.module}", python.arguments, str(python.module)
    script = _absolute(str(source))
    return script, python.arguments, script


def _absolute(path: str) -> str:
    return os.path.normpath(Path.cwd() / path)
