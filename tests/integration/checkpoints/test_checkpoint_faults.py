"""A full, read-only or broken disk under a real save: the error names the cause, and no committed checkpoint is lost.

The full and the read-only disk are mounts in a private mount namespace of the test. strace injects device errors
into system calls.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.restore.verify import verify
from strata.client.checkpoints.manager import CheckpointManager
from tests.processes import Record, Talker

ROOT = Path(__file__).resolve().parents[3]
Need = Callable[[str, bool, str], None]

MANAGER = """
import json, subprocess, sys
import strata
from strata import CheckpointManager
def save(manager, step, size_bytes):
    try:
        manager.save(bytes([step]) * size_bytes, step).wait(60)
        return "committed"
    except strata.StrataError as error:
        return f"{type(error).__name__}: {error}"
"""

FULL = """
manager = CheckpointManager(sys.argv[1], save_grace_s=0)
said = {str(step): save(manager, step, size) for step, size in ((1, 1 << 20), (2, 8 << 20), (3, 1 << 20))}
names = subprocess.run(["find", sys.argv[1], "-name", "*.tmp"], capture_output=True, text=True).stdout
said |= {"steps": manager.all_steps(), "loaded": len(manager.load_bytes()), "left": names}
manager.close()
print(json.dumps({"event": "end", **said}))
"""

READ_ONLY = """
def mount(how):
    subprocess.run(["mount", "-o", f"remount,{how},bind", sys.argv[1]], check=True)
manager = CheckpointManager(sys.argv[1], save_grace_s=0)
said = {"1": save(manager, 1, 1000)}
mount("ro")
said |= {"2": save(manager, 2, 1000), "steps while read-only": manager.all_steps()}
said["loaded"] = len(CheckpointManager(sys.argv[1]).load_bytes())
mount("rw")
said |= {"3": save(manager, 3, 1000), "steps": manager.all_steps()}
manager.close()
print(json.dumps({"event": "end", **said}))
"""

MANY_SAVES = """
manager = CheckpointManager(sys.argv[1], keep_count=4, save_grace_s=0)
said = {}
for step in range(1, 9):
    try:
        said[str(step)] = save(manager, step, 100_000)
        manager.wait_until_finished()
    except strata.StrataError as error:  # of the removal of older ones
        said[f"after {step}"] = f"{type(error).__name__}: {error}"
try:
    manager.close()
except strata.StrataError as error:
    said["at the end"] = f"{type(error).__name__}: {error}"
print(json.dumps({"event": "end", **said}))
"""


def run(*argv: str) -> dict[str, Any]:
    """Return the program's `end` event; fail with all of its output unless it exits with 0."""
    record = Record()
    talker = Talker(argv, name="program", record=record, cwd=ROOT)
    code = talker.join(120)
    talker.wait_quiet()
    assert code == 0, record.events
    return record.of("end")[0]


def mounted(program: str, mount: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    script = f'{mount} && exec "$@"'
    python = (sys.executable, "-c", MANAGER + program, str(folder))
    return run("unshare", "-m", "sh", "-c", script, "sh", *python)


@pytest.fixture
def mounts(need: Need) -> None:
    may = os.geteuid() == 0 and shutil.which("unshare") is not None
    need("mount", may, "run as root, with util-linux, where mount namespaces are allowed")


@pytest.mark.journey
def test_a_full_disk_fails_the_save_and_nothing_else(mounts: None, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    report = mounted(FULL, f"mount -t tmpfs -o size=6m none {folder}", folder)
    assert (report["1"], report["3"]) == ("committed", "committed")
    assert report["2"].startswith("StorageError: cannot ")
    assert "No space left on device" in report["2"]
    assert "free some space" in report["2"]
    assert (report["steps"], report["loaded"], report["left"]) == ([1, 3], 1 << 20, "")


def test_a_disk_that_turns_read_only_can_still_be_read(mounts: None, tmp_path: Path) -> None:
    folder = tmp_path / "turning"
    report = mounted(READ_ONLY, f"mount --bind {folder} {folder}", folder)
    assert report["1"] == "committed"
    assert report["2"].startswith("StorageError: cannot ")
    assert "the file system is read-only" in report["2"]
    assert (report["steps while read-only"], report["loaded"]) == ([1], 1000)
    assert (report["3"], report["steps"]) == ("committed", [1, 3])


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("calls", "when"),
    [
        ("pwrite64", "3+4"),
        ("fsync,fdatasync", "5+7"),
        ("fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink,unlinkat", "4+5"),
    ],
    ids=["write", "sync", "rename"],
)
def test_device_errors_fail_the_save_and_committed_checkpoints_stay_good(
    need: Need, tmp_path: Path, calls: str, when: str
) -> None:
    strace = shutil.which("strace")
    need("strace", strace is not None, "install strace")
    folder, trace = tmp_path / "sick", tmp_path / "trace"
    python = (sys.executable, "-c", MANAGER + MANY_SAVES, str(folder))
    inject = (
        "-f",
        "-qq",
        "-o",
        str(trace),
        "-e",
        f"trace={calls}",
        "-e",
        f"inject={calls}:error=EIO:when={when}",
    )
    report = run(str(strace), *inject, *python)
    committed = {int(step) for step, end in report.items() if end == "committed"}
    failed = [end for end in report.values() if isinstance(end, str) and "Error" in end]
    assert "(INJECTED)" in trace.read_text()
    assert failed, "no error reached the save"
    assert all("Input/output error" in end or "(INJECTED)" in end for end in failed), failed
    with CheckpointManager(folder) as manager:
        kept = manager.all_checkpoints()
        newest = max(committed, default=0)
        assert (manager.latest_step() or 0) >= newest, "what was told to be committed is there"
        for c in kept:
            found = verify(manager._storage, manager._catalog.folder(c), manifest_digest=None)
            assert found.good, found.problems
        manager.save(b"x" * 1000, 50).wait(60)
        assert manager.latest_step() == 50, "on a disk that is sound again saves go on"


def test_saves_succeed_on_a_file_system_without_direct_io(need: Need, tmp_path: Path) -> None:
    strace = shutil.which("strace")
    need("strace", strace is not None, "install strace")
    # saves must be large, because small saves use the page cache and not direct I/O
    program = MANAGER + MANY_SAVES.replace("100_000", "3_000_000")
    python = (sys.executable, "-c", program, str(tmp_path / "odd"))
    inject = ("-f", "-qq", "-o", str(tmp_path / "trace"), "-e", "trace=pwrite64", "-e")
    # the saver thread's first pwrite64 writes the claim, its second the image
    report = run(str(strace), *inject, "inject=pwrite64:error=EINVAL:when=2", *python)
    assert "(INJECTED)" in (tmp_path / "trace").read_text()
    ends = {step: end for step, end in report.items() if step.isdigit()}
    assert ends == {str(step): "committed" for step in range(1, 9)}
