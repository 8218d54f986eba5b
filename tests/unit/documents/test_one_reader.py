"""Only `strata.documents` may parse and read documents, within limits; no other module of `strata/` may."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "strata"
CALLS = frozenset({"loads", "load", "read_text", "read_bytes", "readlines"})
"""Calls of json, tomllib and pathlib. `load` and `loads` count only if their module is one of `PARSERS`."""
PARSERS = frozenset({"json", "tomllib", "pickle", "marshal", "yaml"})
ALLOWED = {
    # data from a session or etcd: at most 1 MiB, from known members
    "client/api/coordinator.py": "a resource, from a replica, in an answer of 256 KiB",
    "cli/watch.py": "an event's payload, from a replica",
    "core/stop/last_step.py": "a member's payload at a barrier",
    "core/kv/codec.py": "a record of etcd, which replicas alone write",
    "integrations/torchrun/meeting.py": "a member's payload at a barrier",
    "integrations/torchrun/store.py": "a worker's own payload",
    "agent/rendezvous.py": "a member's payload at a barrier",
    "training/settings_agreement.py": "a rank's payload at a barrier",
    "training/save/cadence.py": "a rank's payload at a barrier",
    "training/group.py": "rank 0's payload at a barrier",
    "training/save/saves.py": "ranks' payloads at a barrier, and this process's own account",
    # data from a trusted process or file
    "dashboard/api/actions.py": "an operator's request, of at most 16 KiB",
    "dashboard/api/openapi.py": "a file of the package, and our own source",
    "dashboard/api/routes.py": "a file of the package",
    "dashboard/bundle.py": "files of the package",
    "checkpoint/convert/file_export.py": "a header that this process laid out",
    "integrations/torchrun/orphans.py": "/proc",
    "devcluster/etcd_http.py": "an etcd member that this process started",
    "devcluster/ports.py": "/proc",
    "cli/checks/mounts.py": "/proc",
    "agent/health/stack_request.py": "/proc, and what a rank's own process wrote",
    "agent/rank_process.py": "the kernel's, of a process",
    "launch/warm/warm_program.py": "a line of the agent that started it",
    # data that the user names, of any size
    "cli/checkpoints/copying.py": "a file that becomes a checkpoint, byte for byte",
    "launch/warm/script_imports.py": "the user's own program",
}
"""Exceptions: the modules that may parse or read by themselves, with the data that they read."""


def readings(source: str) -> list[int]:
    """Return the line numbers on which a module parses or reads by itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in PARSERS:
            found += [node.lineno for name in node.names if name.name in CALLS]
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "msgspec.json.decode":
            found.append(node.lineno)
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS
        ):
            continue
        of = node.func.value
        if node.func.attr not in {"load", "loads"} or (isinstance(of, ast.Name) and of.id in PARSERS):
            found.append(node.lineno)
    return found


def test_documents_are_read_in_one_place() -> None:
    files = [path for path in ROOT.rglob("*.py") if path.parts[-2] not in {"documents", "v1", "etcdapi"}]
    assert len(files) > 300
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    found = {
        name
        for name, text in texts.items()
        if any(call in text for call in (*CALLS, "msgspec")) and readings(text)
    }
    assert not found - ALLOWED.keys(), "read it by strata.documents, or say here what bounds it"
    assert not ALLOWED.keys() - found, "these read nothing any more: take them away"


@pytest.mark.parametrize(
    "source",
    [
        "json.loads(x)",
        "tomllib.load(f)",
        "from json import loads",
        "path.read_text()",
        "p.read_bytes()",
        "pickle.load(f)",
        "msgspec.json.decode(x)",
    ],
)
def test_the_check_detects_each_way_of_parsing(source: str) -> None:
    assert readings(source)
    assert not readings("documents.json_value(x); torch.load(y); path.write_text(z)")
