"""Runs the quick unit tests under the oldest and the newest versions that Strata supports: `make test-versions`.

Each environment is below `.strata/versions`. The oldest has each dependency of pyproject.toml at its lower bound. The
newest has the newest versions that the registry offers within the bounds. Python versions that are not on PATH are
named and skipped.
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
PYTHONS = ("python3.11", "python3.14")


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
    results: dict[str, bool | None] = {}
    for python in PYTHONS:
        for which in (given.only,) if given.only else ("oldest", "newest"):
            found = shutil.which(python)
            results[f"{python}, {which}"] = tested(python, which, arguments) if found else None
    for name, held in results.items():
        print(f"{name}: {'not on PATH, left out' if held is None else 'passed' if held else 'FAILED'}")
    return 0 if all(held is not False for held in results.values()) and any(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
