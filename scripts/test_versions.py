"""Runs the quick unit tests under the oldest and the newest versions that Strata supports: `make test-versions`.

Each environment is below `.strata/versions`. The oldest has each dependency of pyproject.toml at its lower bound. The
newest has the newest versions that the registry offers within the bounds. The oldest Python is 3.11, the newest is the
newest that this machine has.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".strata" / "versions"
OLDEST = ("python3.11",)
NEWEST = ("python3.14", "python3.13", "python3.12")


def lower_bounds() -> list[str]:
    """Return a pin for each dependency of the base, of `server` and of `s3` that has a lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["server"], *extras["s3"]]
    found = (re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?>=([0-9.]+)", each) for each in wanted)
    return [f"{each[1]}=={each[2]}" for each in found if each]


def run(*command: str) -> int:
    print("$", *command, flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def runs(python: str) -> bool:
    """Return whether this Python is on PATH and starts (a shim of pyenv may start nothing)."""
    found = shutil.which(python)
    return (
        found is not None
        and subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode == 0
    )


def tested(python: str, which: str, arguments: list[str]) -> bool:
    """Make the environment, print its versions, and run the tests; return True if they passed."""
    environment = FOLDER / f"{python}-{which}"
    shutil.rmtree(environment, ignore_errors=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    pins = FOLDER / f"{which}.txt"
    pins.write_text("\n".join(lower_bounds() if which == "oldest" else []) + "\n")
    if run(python, "-m", "venv", str(environment)):
        return False
    if run(*pip, "-c", str(pins), "-e", ".[dev]", "torch==2.13.0"):
        return False
    run(str(environment / "bin" / "python"), "-m", "pip", "freeze", "--exclude-editable")
    tests = ["tests/unit", "tests/contract", "-m", "not slow and not campaign", "-q", "-n", "2", *arguments]
    return run(str(environment / "bin" / "python"), "-m", "pytest", *tests) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("oldest", "newest"), help="one of the two")
    given, arguments = parser.parse_known_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    pythons = [found for names in (OLDEST, NEWEST) for found in list(filter(runs, names))[:1]]
    if not pythons:
        print("no Python from 3.11 on is on PATH", file=sys.stderr)
        return 1
    results = {
        f"{python}, {which} libraries": tested(python, which, arguments)
        for python in pythons
        for which in ((given.only,) if given.only else ("oldest", "newest"))
    }
    for name, passed in results.items():
        print(f"{name}: {'passed' if passed else 'FAILED'}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
