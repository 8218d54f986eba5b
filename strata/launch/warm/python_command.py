"""Parses a command line as Python would: which script or module it runs, with which flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

_PROGRAM = re.compile(r"python(3(\.\d+)?)?")
_PLAIN_FLAGS = frozenset("bBdEIOPqRsSuv")
_FLAGS_WITH_VALUE = frozenset("WX")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCommand:
    """`program flags… script arguments…`, or `-m module` in the script's place."""

    program: str
    flags: tuple[str, ...]
    target: tuple[str, ...]
    """`(script,)` or `("-m", module)`."""
    arguments: tuple[str, ...]

    @property
    def script(self) -> str | None:
        return self.target[0] if len(self.target) == 1 else None

    @property
    def module(self) -> str | None:
        return self.target[1] if len(self.target) == 2 else None


def python_command(command: Sequence[str]) -> PythonCommand | None:
    """Return `command` parsed as Python's; None for another program, `-c`, `-i`, or a script on stdin."""
    program, *words = command
    if not _PROGRAM.fullmatch(PurePath(program).name):
        return None
    flags: list[str] = []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            return PythonCommand(program=program, flags=tuple(flags), target=(word,), arguments=tuple(words))
        if word == "--check-hash-based-pycs" and words:
            flags += [word, words.pop(0)]
            continue
        plain = word[1:].lstrip("".join(_PLAIN_FLAGS))
        before = word[: len(word) - len(plain)]
        if word == "-" or word.startswith("--") or (plain and plain[0] not in {"m", *_FLAGS_WITH_VALUE}):
            return None
        if not plain:
            flags.append(word)
            continue
        own = [] if plain[1:] else words[:1]
        del words[: len(own)]
        value = plain[1:] or "".join(own)
        if not value:
            return None
        if plain[0] == "m":
            flags += [before] if before != "-" else []
            return PythonCommand(
                program=program, flags=tuple(flags), target=("-m", value), arguments=tuple(words)
            )
        flags += [word, *own]
    return None


def source_of(python: PythonCommand) -> Path | None:
    """Return the file that the command runs, if it can be found without importing anything."""
    if python.script is not None:
        script = Path(python.script)
        return script if script.is_file() and script.suffix != ".pyc" else None
    base = Path(*(python.module or "").split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__main__.py") if p.is_file()), None)
