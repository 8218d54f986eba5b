"""The status line of `strata run`: its text, and other output around it."""

from __future__ import annotations

import os
import pty
import re
import sys
from pathlib import Path

import pytest

from strata.launch.bottom_line import BottomLine
from strata.launch.run_progress import RunProgress
from strata.v1.checkpoints_pb2 import CHECKPOINT_STATE_COMMITTED, CHECKPOINT_STATE_OPEN, Checkpoint
from strata.v1.members_pb2 import RankProgress, TrainingReport
from tests.terminals import Screen

TRAINING = TrainingReport(target_step=1000, reported={"lr": 0.0003, "loss": 2.25, "zeta": 1.0})


def printed(progress: RunProgress, width: int = 100, now_s: float = 20.0) -> str:
    line = progress.line(width, now_s)
    assert line is not None
    assert line.cell_len <= width
    return line.plain


def received(*, target: bool = True) -> RunProgress:
    """Return the progress after 20 s. Each of two ranks made 5 steps a second, and rank 1 is one step behind."""
    progress = RunProgress("gpt")
    progress.begin(3)
    for second in range(21):
        training = TRAINING if target else None
        progress.record(3, [RankProgress(rank=0, step=100 + 5 * second, training=training)], second)
        progress.record(3, [RankProgress(rank=1, step=99 + 5 * second, phase="step")], second)
    return progress


def test_the_line_shows_the_slowest_ranks_progress_and_the_eta() -> None:
    words = printed(received(), 140)
    assert "19.9 %  ETA 2 min 40 s" in words
    assert words.endswith("5.00 steps/s  loss 2.25  lr 0.0003")


@pytest.mark.parametrize("width", [10, 30, 60, 79, 120, 300])
def test_the_status_line_is_no_wider_than_the_terminal(width: int) -> None:
    assert len(printed(received(), width)) <= width


def test_without_a_last_step_the_status_line_shows_no_time_left() -> None:
    assert printed(received(target=False)) == "gpt  step 199  5.00 steps/s"


def test_before_the_first_step_there_is_no_line() -> None:
    progress = RunProgress("gpt")
    progress.begin(1)
    assert progress.line(80, 1.0) is None
    progress.record(1, [RankProgress(rank=0, step=0)], 1.0)
    assert progress.line(80, 1.0) is None


def test_the_shown_rate_falls_while_no_rank_progresses() -> None:
    progress = received()
    assert "5.00 steps/s" in printed(progress, now_s=21.0)
    assert "2.50 steps/s" in printed(progress, now_s=40.0)


def test_the_status_line_begins_with_a_stuck_rank() -> None:
    progress = received()
    progress.record(3, [RankProgress(rank=1, step=199, phase="data", stalled_ms=42_000)], 20.0)
    assert printed(progress).startswith("gpt  rank 1 stuck in data for 42 s  step 199 of 1,000")


def test_the_stuck_time_of_a_rank_grows_without_a_new_report() -> None:
    progress = received()
    stuck = RankProgress(rank=1, step=199, phase="data", stalled_ms=42_000, age_ms=42_000)
    progress.record(3, [stuck], 20)
    assert "rank 1 stuck in data for 42 s" in printed(progress, now_s=20.0)
    assert "rank 1 stuck in data for 52 s" in printed(progress, now_s=30.0)
    progress.record(3, [stuck], 30)  # the same report again: the rank has made no progress in between
    assert "rank 1 stuck in data for 52 s" in printed(progress, now_s=30.0)
    progress.record(3, [RankProgress(rank=1, step=200, phase="data")], 31)
    assert "stuck" not in printed(progress, now_s=31.0)
    progress.record(3, [RankProgress(rank=1, step=200, phase="data", stalled_ms=5000, age_ms=5000)], 40)
    assert "rank 1 stuck in data for 6 s" in printed(progress, now_s=41.0)


def test_the_line_shows_the_newest_committed_step() -> None:
    progress = received()
    progress.committed(Checkpoint(step=150, state=CHECKPOINT_STATE_COMMITTED))
    progress.committed(Checkpoint(step=175, state=CHECKPOINT_STATE_OPEN))
    progress.committed(Checkpoint(step=100, state=CHECKPOINT_STATE_COMMITTED))
    assert printed(progress, 140).endswith("saved 150")


def test_a_new_generation_resets_the_line() -> None:
    progress = received()
    progress.begin(4)
    assert progress.line(80, 21.0) is None
    progress.record(3, [RankProgress(rank=0, step=500)], 21.0)
    assert progress.line(80, 21.0) is None


def test_control_characters_in_a_phase_are_not_printed() -> None:
    progress = RunProgress("gpt")
    progress.begin(1)
    progress.record(1, [RankProgress(rank=0, step=5, phase="\x1b[2J", stalled_ms=5000)], 1.0)
    assert "\x1b" not in printed(progress)


# -- the terminal's last line

PACKET = re.compile(
    r"(?:\x1bD\x1b\[A)?\x1b7(?:(?!\x1b8).)*\x1b8(?:\x1bD\x1b\[A\x1b7(?:(?!\x1b8).)*\x1b8)*", re.DOTALL
)

DRAWS = """
import os, subprocess, sys, time
from strata.launch.bottom_line import BottomLine
writer = "import os; [os.write(1, b'line %d %b\\\\n' % (n, b'x' * 40)) for n in range(2000)]"
print("before", flush=True)
line = BottomLine.of(2, os.environ)
assert line is not None
assert BottomLine.of(2, os.environ) is None
writers = [subprocess.Popen([sys.executable, "-c", writer]) for _ in range(2)]
count = 0
while any(each.poll() is None for each in writers):
    line.show("status %d" % count)
    count += 1
line.show("status at the end")
line.close()
print("after", flush=True)
"""


def test_the_line_never_splits_the_output_of_others() -> None:
    with Screen([sys.executable, "-c", DRAWS], columns=80, rows=24) as screen:
        screen.wait_for("after")
        assert screen.ended() == 0
        assert screen.is_restored()
        assert len(re.findall(r"status \d+", screen.raw)) > 10
        left = PACKET.sub("", screen.raw)
        assert "\x1b" not in left
        lines = left.split("\r\n")
        whole = [f"line {number} {'x' * 40}" for number in range(2000)]
        assert lines[0] == "before"
        assert lines[-2] == "after"
        assert sorted(lines[1:-2]) == sorted([*whole, *whole])


REGION = """
import os, time
from strata.launch.bottom_line import BottomLine
line = BottomLine.of(2, os.environ)
line.show("first")
os.write(1, b"ready\\n")
while os.get_terminal_size(2).lines != 12:
    time.sleep(0.01)
line.show("second")
os.write(1, b"resized\\n")
while os.get_terminal_size(2).lines != 3:
    time.sleep(0.01)
line.show("third")
os.write(1, b"tiny\\n")
"""


def test_the_line_follows_a_terminal_resize_and_disappears_if_it_is_too_small() -> None:
    with Screen([sys.executable, "-c", REGION], columns=80, rows=24) as screen:
        screen.wait_for("ready")
        assert "\x1b[1;23r" in screen.raw
        assert "\x1b[24;1H\x1b[0mfirst" in screen.raw
        screen.resize(80, 12)
        screen.wait_for("resized")
        assert "\x1b[r\x1b[24;1H\x1b[2K" in screen.raw
        assert "\x1b[1;11r" in screen.raw
        assert "\x1b[12;1H\x1b[0msecond" in screen.raw
        screen.resize(80, 3)
        screen.wait_for("tiny")
        assert "third" not in screen.raw
        assert screen.ended() == 0
        assert screen.is_restored()


@pytest.mark.parametrize(
    "env", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}, {}], ids=["no color", "dumb", "no TERM"]
)
def test_there_is_no_line_if_plain_output_is_requested(env: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    assert BottomLine.of(theirs, env) is None
    os.close(ours)
    os.close(theirs)


def test_a_pipe_gets_no_status_line() -> None:
    ours, theirs = os.pipe()
    assert BottomLine.of(theirs, {"TERM": "xterm"}) is None
    os.close(ours)
    os.close(theirs)


STOPPED = """
import os, time
from strata.launch.bottom_line import BottomLine
line = BottomLine.of(2, os.environ)
while not os.path.exists({path!r}):
    line.show("x" * 70)
line.close()
"""


def test_a_stopped_terminal_does_not_block_the_process(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with Screen([sys.executable, "-c", STOPPED.format(path=str(end))]) as screen:
        screen.wait_for("xxx")
        screen.press("\x13")  # Ctrl-S
        end.touch()
        assert screen.ended() == 0


SHOWN = """
import asyncio, os
from strata.launch import run_progress
from strata.launch.run_progress import RunProgress, shown
from strata.v1.members_pb2 import RankProgress

run_progress.EVERY_S = 0.05
progress = RunProgress("gpt")
progress.begin(1)
progress.record(1, [RankProgress(rank=0, step=7)], 0.0)

async def main():
    async with shown(progress, 2, wanted=True):
        await asyncio.get_running_loop().run_in_executor(None, os.read, 0, 10)

asyncio.run(main())
"""


def test_ctrl_z_releases_the_terminal_line_until_the_command_continues() -> None:
    with Screen([sys.executable, "-c", SHOWN]) as screen:
        screen.wait_for("gpt  step 7")
        screen.press("\x1a")
        screen.stopped()
        assert screen.is_restored()
        screen.forget()
        screen.go_on()
        screen.wait_for("gpt  step 7")
        assert not screen.is_restored()
        screen.press("\n")
        assert screen.ended() == 0
        assert screen.is_restored()
