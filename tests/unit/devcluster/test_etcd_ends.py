from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.devcluster.etcd_cluster import _ended
from strata.processes.children import Child

PANIC = """panic: failed to write: write db: no space left on device
goroutine 1 [running]:
go.uber.org/zap/zapcore.(*CheckedEntry).Write(0xc00027e000, {0x0, 0x0, 0x0})
"""


@pytest.mark.parametrize(
    ("printed", "message", "hint"),
    [
        (PANIC, "no space left on device", "free some space"),
        ("open wal: read-only file system", "read-only file system", "--data"),
        ("something else", "something else", "its log is"),
    ],
    ids=["a full disk", "a read-only one", "another cause"],
)
def test_the_cause_of_etcd_s_exit_is_one_line(printed: str, message: str, hint: str, tmp_path: Path) -> None:
    log = tmp_path / "etcd.log"
    child = Child.start([sys.executable, "-c", f"import sys; sys.exit({printed!r})"], name="etcd-1", log=log)
    child.join(20)
    member: Any = SimpleNamespace(name="etcd-1", child=child, log=log)
    error = _ended(member)
    assert message in error.message
    assert "goroutine" not in str(error)
    assert hint in error.hint
