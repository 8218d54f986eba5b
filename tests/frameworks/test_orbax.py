"""docs/frameworks/jax.md: the programs that come from Orbax and leave to Orbax run unchanged, and lose no bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster_fixtures import ROOT

for library in ("flax", "optax", "orbax.checkpoint", "sklearn"):
    pytest.importorskip(library)
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

PAGE = (ROOT / "docs" / "frameworks" / "jax.md").read_text()
FROM, TO = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

STEP = 7
SAVE = f"""
from pathlib import Path
import jax
import orbax.checkpoint as ocp
from flax import nnx
from train import digest, make
state = jax.tree.map(lambda leaf: leaf + {STEP}, nnx.state(make()))
with ocp.CheckpointManager(Path("orbax").absolute()) as orbax:
    orbax.save({STEP}, args=ocp.args.StandardSave(state))
print(digest(state))
"""
TRAIN = """
run.step_done()
run.close()
"""
READ = """
from pathlib import Path
import orbax.checkpoint as ocp
from flax import nnx
from train import digest, make
with ocp.CheckpointManager(Path("leave").absolute()) as orbax:
    print(orbax.latest_step(), digest(orbax.restore(1, args=ocp.args.StandardRestore(nnx.state(make())))))
"""


def run(folder: Path, *command: str) -> str:
    """Run Python in `folder`, where the example's `train` can be imported; return its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env={**env, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples" / "flax")])},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a training that began from Orbax's state and saved its step 1, and the digest of this state."""
    folder = tmp_path_factory.mktemp("came")
    digest = run(folder, "-c", SAVE)
    run(folder, "-c", FROM + TRAIN)
    return folder, digest


def test_a_state_comes_from_orbax_and_leaves_to_orbax(came: tuple[Path, str], tmp_path: Path) -> None:
    folder, digest = came
    (tmp_path / "strata").symlink_to(folder / "strata")
    run(tmp_path, "-c", TO)
    assert run(tmp_path, "-c", READ) == f"1 {digest}"


def test_an_exported_file_leaves_to_orbax(came: tuple[Path, str], tmp_path: Path) -> None:
    folder, digest = came
    export = ("checkpoints", "export", "latest", "leave.safetensors", "--only", "trained")
    run(tmp_path, "-m", "strata", *export, "--storage", str(folder / "strata"))
    (load,) = re.findall(r"`(trained\.load_state_dict\(.*?\))`", PAGE)
    restore = re.compile(r"^with CheckpointManager.*\n.*restore.*\n", re.MULTILINE)
    program = restore.sub(f"import safetensors.numpy\n{load}\n", TO).replace("restored.step", "1")
    assert "restore(" not in program
    run(tmp_path, "-c", program)
    assert run(tmp_path, "-c", READ) == f"1 {digest}"
