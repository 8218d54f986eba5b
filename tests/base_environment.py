"""A virtual environment in which Strata is installed without any of its extras, as in a trainer image.

It is a real environment: an interpreter with its own packages folder, in which each package of the base is a link to
the package in the tests' environment. Processes that use this interpreter, and their children, find no other packages.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

DISTRIBUTION = "strata-control"


def make(folder: Path, *, extras: Iterable[str] = ()) -> Path:
    """Make the environment in the new `folder`, with these extras; return its interpreter."""
    packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    packages.mkdir(parents=True)
    for name in _with_dependencies(DISTRIBUTION, frozenset(extras)):
        for top in _top_levels(name):
            if not (packages / top).is_symlink() and not top.endswith(".pth"):
                (packages / top).symlink_to(Path(str(importlib.metadata.distribution(name).locate_file(top))))
    program = folder / "bin" / "python"
    program.parent.mkdir()
    program.symlink_to(Path(sys.executable).resolve())
    home = Path(sys.executable).resolve().parent
    (folder / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    return program


def _top_levels(name: str) -> set[str]:
    """Return the files and folders that a distribution put directly into the packages folder."""
    files = importlib.metadata.distribution(name).files or ()
    return {file.parts[0] for file in files if file.parts[0] not in {os.pardir, "__pycache__"}}


def _with_dependencies(name: str, extras: frozenset[str]) -> set[str]:
    """Return this distribution and those that `pip install` of it and these extras needs."""
    found: dict[str, frozenset[str]] = {}
    waiting = [(name, extras)]
    while waiting:
        one, wanted = waiting.pop()
        if one in found and wanted <= found[one]:
            continue
        found[one] = found.get(one, frozenset()) | wanted
        for line in importlib.metadata.requires(one) or ():
            needed = Requirement(line)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *wanted}):
                waiting.append((needed.name, frozenset(needed.extras)))
    return set(found)
