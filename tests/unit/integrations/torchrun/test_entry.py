"""The entry point: its discovery by torch, and its cost for programs that import torch's rendezvous."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata.errors import (
    ConfigError,
    Conflict,
    JobDone,
    JobFailed,
    PermissionDenied,
    Refused,
    StaleIncarnation,
    StrataError,
    Unavailable,
)
from tests.cluster_fixtures import ROOT
from tests.torchrun_agents import entry_points


def printed(program: str, paths: tuple[Path, ...] = ()) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, env=env
    )
    return done.stdout.strip()


def test_the_entry_point_imports_neither_grpc_nor_torch() -> None:
    program = (
        "import sys; from strata.integrations.torchrun import handler; handler();"
        "print([name for name in ('grpc', 'torch', 'google.protobuf', 'structlog') if name in sys.modules])"
    )
    assert printed(program) == "[]"


@pytest.mark.usefixtures("torch_installed")
def test_torch_finds_the_backend_and_loads_no_grpc_for_it(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry\n"
        "from strata.integrations.torchrun import create\n"
        "print(registry._registry['strata'] is create, 'grpc' in sys.modules)"
    )
    assert printed(program, (entry_points(tmp_path),)) == "True False"


@pytest.mark.usefixtures("torch_installed")
@pytest.mark.parametrize(
    ("error", "name"),
    [
        (JobFailed("x"), "RendezvousClosedError"),
        (JobDone("x", hint="go on with --resume"), "RendezvousClosedError"),
        (Refused("x"), "RendezvousClosedError"),
        (Conflict("x"), "RendezvousStateError"),
        (StaleIncarnation("x"), "RendezvousStateError"),
        (ConfigError("x"), "RendezvousStateError"),
        (Unavailable("x"), "RendezvousTimeoutError"),
        (PermissionDenied("x"), "RendezvousConnectionError"),
    ],
)
def test_errors_come_as_torch_s(error: StrataError, name: str) -> None:
    from strata.integrations.torchrun.handler import as_torchs  # noqa: PLC0415  # imports torch

    found = as_torchs(error, attempt=0)
    assert type(found).__name__ == name
    assert "x" in str(found)
    assert "--resume" not in str(found), "torchrun has no such option"
    if name == "RendezvousClosedError":
        assert "--rdzv-conf=attempt=N" in str(found)
