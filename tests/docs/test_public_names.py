"""The public names are exact, and importing the package stays cheap and safe."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from typer.testing import CliRunner

import strata
from strata import errors
from strata.cli.app import assembled

ROOT = Path(__file__).resolve().parents[2]

EXISTING = [
    "AsyncCheckpointWriter",
    "CheckpointAck",
    "CheckpointMetadata",
    "RecoveryResponse",
    "CheckpointManager",
    "CheckpointManagerConfig",
    "CheckpointType",
    "CoordinatorClient",
    "DatasetRegistry",
    "ShardManager",
    "TrainingOrchestrator",
    "StrataError",
    "NotLeader",
    "StaleGeneration",
    "StaleIncarnation",
    "ClusterReplaced",
    "OutcomeUnknown",
    "BarrierTimeout",
    "BarrierBroken",
    "CheckpointCorrupt",
    "CheckpointNotFound",
    "StorageError",
    "ConfigError",
    "QuotaExceeded",
    "Unavailable",
    "init",
    "deterministic",
    "ElasticSampler",
    "Run",
    "TrainingConfig",
    "TrainingWorld",
]
"""The public names of the design that exist now; a new feature adds its names here."""


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_are_importable() -> None:
    python(f"from strata import {', '.join(EXISTING)}")


def test_importing_strata_imports_no_grpc() -> None:
    # GRPC_ENABLE_FORK_SUPPORT=0 must be set before grpc is imported (forked DataLoader workers)
    heavy = ["grpc", "google.protobuf", "torch", "numpy"]
    loaded = python(f"import sys, strata; print([name for name in {heavy} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_the_version_is_the_package_version_and_is_loaded_on_first_access() -> None:
    code = (
        "import sys, strata; before = 'importlib.metadata' in sys.modules;"
        "print(before, strata.__version__, strata.__version__ == vars(strata)['__version__'])"
    )
    assert python(code).split() == ["False", metadata.version("strata-control"), "True"]


def test_the_command_line_prints_the_package_version() -> None:
    done = CliRunner().invoke(assembled("status"), ["--version"])
    assert (done.exit_code, done.output) == (0, f"strata {strata.__version__}\n")


def test_each_error_code_belongs_to_one_class() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.StrataError)]
    assert len({c.code for c in classes}) == len(classes), "codes travel over the wire"
