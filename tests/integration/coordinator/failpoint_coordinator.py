"""A warm coordinator that kills itself at a chosen transaction of a world change.

    FAILPOINT=file python failpoint_coordinator.py --replica r1 …

The file arms the failpoint with a job's name, a number n and a mode. At the leader's n-th write to that job, the
process kills itself: "unsent" before it sends the write to etcd, "unanswered" after etcd has committed it. It renames
the file first, so only one process dies. Chunks are tiny, so that a world of a few members takes several transactions.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import strata.coordinator.main  # noqa: F401  # the slow import
from strata.cli import main
from strata.core.kv import chunks
from strata.core.kv.txn import Txn, TxnResult
from strata.etcd import EtcdStore

POINT = Path(os.environ["FAILPOINT"])
_execute = EtcdStore.execute
_seen: dict[str, int] = {}


def _met(txn: Txn) -> str:
    """Return the armed mode if this is the n-th fenced write to the job, else ""."""
    try:
        job, number, mode = POINT.read_text().split()
    except (FileNotFoundError, ValueError):
        return ""
    fenced = any(compare.key.endswith("/leader") for compare in txn.compares)
    if not fenced or not any(f"/jobs/{job}/" in operation.key for operation in txn.success):
        return ""
    _seen[job] = _seen.get(job, 0) + 1
    return mode if _seen[job] == int(number) else ""


def _die() -> None:
    POINT.rename(POINT.with_suffix(".fired"))
    os.kill(os.getpid(), signal.SIGKILL)


async def _mortal(self: EtcdStore, txn: Txn) -> TxnResult:
    mode = _met(txn)
    if mode == "unsent":
        _die()
    result = await _execute(self, txn)
    if mode == "unanswered":
        _die()
    return result


if __name__ == "__main__":
    chunks.MAX_CHUNK_MEMBERS = 2
    chunks.MAX_BYTES = 250
    EtcdStore.execute = _mortal  # type: ignore[method-assign]
    if sys.stdin.readline():
        sys.argv[1:1] = ["coordinator"]
        main()
