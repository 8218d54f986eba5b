"""Tests Strata with the real libraries of other frameworks: `make test-frameworks`.

Each group of frameworks has an environment of its own below `.strata/frameworks`, so that none of them changes the
version of another's libraries. An environment is kept, and made anew if its list of packages changes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".strata" / "frameworks"
TORCH = "torch==2.13.0"
PACKAGES = {
    "torch": (
        *(TORCH, "lightning==2.6.6", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0"),
        "tensorboard==2.21.0",
    ),
    # torch, because torchdata would bring another build of it
    "jax": (TORCH, "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "orbax-checkpoint==0.12.8"),
}
"""The versions that are tested; docs/frameworks/README.md names them."""
TESTS = {
    "torch": ("accelerate", "hf_datasets", "hf_folder", "lightning", "tensorboard", "transformers"),
    "jax": ("flax", "orbax"),
}


def run(*command: str) -> int:
    print("$", *command, flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def python_of(group: str) -> str | None:
    """Return the interpreter of a group's environment, which is made first if need be; None if it cannot be made."""
    environment = FOLDER / group
    python = str(environment / "bin" / "python")
    wanted = "\n".join([sys.version, *PACKAGES[group]])
    made = environment / "packages.txt"
    if made.exists() and made.read_text() == wanted:
        return python
    shutil.rmtree(environment, ignore_errors=True)
    if run(sys.executable, "-m", "venv", str(environment)):
        return None
    if run(
        python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-e", ".[dev]", *PACKAGES[group]
    ):
        return None
    made.write_text(wanted)
    return python


def tested(group: str, arguments: list[str]) -> bool:
    python = python_of(group)
    if python is None:
        return False
    os.environ["STRATA_REQUIRE"] = "etcd"
    tests = [f"tests/frameworks/test_{name}.py" for name in TESTS[group]]
    return run(python, "-m", "pytest", "-n", "0", *tests, *arguments) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(PACKAGES), help="one of the groups")
    given, arguments = parser.parse_known_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = {
        group: tested(group, arguments) for group in ((given.only,) if given.only else tuple(PACKAGES))
    }
    for group, passed in results.items():
        print(f"{group}: {'passed' if passed else 'FAILED'}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
