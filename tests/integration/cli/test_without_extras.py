"""Without an extra, each command that needs it fails with the extra's name, and no command prints a traceback."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from strata.cli.app import COMMANDS
from tests import base_environment
from tests.cluster_fixtures import ROOT

NO_BLAME = "127.0.0.1:1"
SERVER = 'hint: pip install "strata-control[server]"'
S3 = 'hint: pip install "strata-control[s3]"'
WANTING = [
    (("dev", "--data", "{tmp}"), "error: a coordinator needs grpc_health, ", SERVER),
    (("coordinator", "--etcd", NO_BLAME), "error: a coordinator needs grpc_health, ", SERVER),
    (
        ("certs", "ca", "--out", "{tmp}"),
        "error: certificates are made with the library `cryptography`",
        SERVER,
    ),
    (("checkpoints", "list", "--storage", "s3://bucket/x"), "error: checkpoints in S3 need ", S3),
    (
        ("controlplane", "backup", "--etcd", NO_BLAME, "--to", "s3://bucket/x"),
        "error: backups in S3 need",
        S3,
    ),
]
"""Commands, and the two lines that each command prints."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that finds the base package but no extra."""
    return base_environment.make(tmp_path_factory.mktemp("base") / "venv")


def strata(python: Path, *words: str) -> tuple[int, list[str]]:
    """Run a command to its end; return its exit status and its lines."""
    done = subprocess.run(
        (str(python), "-m", "strata", *words),
        env={"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize(("words", "error", "hint"), WANTING, ids=[w[0] for w, _, _ in WANTING])
def test_a_command_without_its_extra_says_which_to_install(
    python: Path, tmp_path: Path, words: tuple[str, ...], error: str, hint: str
) -> None:
    code, output = strata(python, *(word.format(tmp=tmp_path) for word in words))
    assert code == 2, output
    assert len(output) == 2, output
    assert output[0].startswith(error)
    assert output[1] == hint


def test_all_commands_load_without_any_extra(python: Path) -> None:
    code, output = strata(python, "--help")  # --help loads all commands
    assert code == 0, output
    assert all(any(f" {command} " in line for line in output) for command in COMMANDS)


def test_the_environment_is_without_the_extras(python: Path) -> None:
    extras = "boto3", "cryptography", "grpc_health", "jax", "jinja2", "numpy", "obstore", "pynvml", "torch"
    program = f"import importlib.util as u; print([n for n in {extras} if u.find_spec(n)])"
    assert subprocess.check_output((str(python), "-c", program), text=True, env={}) == "[]\n"
