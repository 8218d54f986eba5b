from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from strata.processes.children import Child
from strata_chaos.faults.parts import WorkloadPart
from strata_chaos.run.roster import Roster, stat_of


def started(folder: Path, pid: int, role: str = "member", *, file: str = "barriers-1.0-1.jsonl") -> None:
    with (folder / file).open("a") as history:
        history.write(json.dumps({"op": "process.started", "args": {"pid": pid, "role": role}}) + "\n")


@pytest.fixture
def child() -> Child:
    return Child.start([sys.executable, "-c", "import signal; signal.pause()"])


def test_live_processes_are_found_by_role(tmp_path: Path, child: Child) -> None:
    roster = Roster(tmp_path)
    assert roster.of("member") == []

    started(tmp_path, os.getpid())
    started(tmp_path, child.pid, "rank", file="training-1.jsonl")

    assert [target.pid for target in roster.of("member")] == [os.getpid()]
    assert [target.name for target in roster.of("rank")] == [f"rank:{child.pid}"]
    child.kill()
    child.join()
    assert roster.of("rank") == []


def test_a_partial_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    roster, path = Roster(tmp_path), tmp_path / "w.jsonl"
    line = json.dumps({"op": "process.started", "args": {"pid": os.getpid(), "role": "member"}})
    path.write_text(line[:30])
    assert roster.of("member") == []

    path.write_text(f"{line}\n")

    assert len(roster.of("member")) == 1


def test_a_workload_process_is_killed_with_proof(tmp_path: Path, child: Child) -> None:
    started(tmp_path, child.pid)
    (target,) = Roster(tmp_path).of("member")
    part = WorkloadPart(target)
    assert part.killed() == (False, f"member:{child.pid} lives")

    part.kill()

    assert child.join(5) == -signal.SIGKILL
    assert part.killed() == (True, f"member:{child.pid} was sent SIGKILL while it lived, and has ended")


def test_a_process_that_had_already_exited_does_not_count_as_killed(tmp_path: Path, child: Child) -> None:
    started(tmp_path, child.pid)
    (target,) = Roster(tmp_path).of("member")
    child.kill()
    child.join()

    part = WorkloadPart(target)
    part.kill()

    assert not part.killed()[0]


def test_a_frozen_process_is_stopped_and_resumes_after_a_thaw(tmp_path: Path, child: Child) -> None:
    started(tmp_path, child.pid)
    (target,) = Roster(tmp_path).of("member")
    part = WorkloadPart(target)

    part.freeze()
    assert part.frozen() == (True, f"member:{child.pid} (pid {child.pid}) is in state T")
    assert target.alive

    part.thaw()
    assert not part.frozen()[0]
    child.kill()
    child.join()


def test_an_exited_process_has_no_state() -> None:
    assert stat_of(2**22 + 1) is None
