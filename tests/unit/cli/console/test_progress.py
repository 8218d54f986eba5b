"""Progress of long operations, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from strata.cli.console import progress
from strata.cli.console.progress import byte_progress, item_progress
from tests.terminals import Screen

SHOWS = """
import sys
from strata.cli.console.progress import byte_progress, item_progress
with byte_progress("step 5", 1 << 20) as advance:
    for _ in range(8):
        advance(1 << 17)
with item_progress("what may go") as advance:
    advance()
    sys.stdout.write("removed a\\n")
print("done")
"""


@pytest.fixture
def every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)


@pytest.mark.usefixtures("every_time")
def test_progress_in_a_pipe_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "stderr", output)
    with byte_progress("step 5", 2048) as advance:
        advance(1024)
        advance(1024)
    with item_progress("what may go") as one_more:
        one_more()
        one_more()
    assert output.getvalue().splitlines() == [
        "step 5: 1.0 KiB of 2.0 KiB",
        "step 5: 2.0 KiB of 2.0 KiB",
        "what may go: 1",
        "what may go: 2",
    ]


def test_progress_on_a_terminal_is_a_bar_that_is_removed_at_the_end() -> None:
    with Screen([sys.executable, "-c", SHOWS]) as screen:
        assert screen.ended() == 0
        assert "1.0/1.0 MiB" in screen.text
        assert screen.text.index("removed a") < screen.text.index("done")
        assert screen.is_restored()


def test_a_dumb_terminal_gets_no_bar() -> None:
    with Screen([sys.executable, "-c", SHOWS], env={"TERM": "dumb"}) as screen:
        assert screen.ended() == 0
        assert screen.raw == "removed a\r\ndone\r\n"


@pytest.mark.parametrize(
    ("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)], ids=str
)
def test_logs_have_colours_only_on_a_terminal_that_permits_them(env: dict[str, str], coloured: bool) -> None:
    script = "from strata.observe import configure, get_logger; configure(); get_logger().info('it.happened')"
    with Screen([sys.executable, "-c", script], env=env) as screen:
        assert screen.ended() == 0
        assert "it.happened" in screen.text
        assert ("\x1b[" in screen.raw) == coloured


CTRL_C = """
import time
from strata.cli.console.progress import byte_progress
with byte_progress("step 5", 1 << 20) as advance:
    advance(1)
    print("begun", flush=True)
    time.sleep(60)
"""


def test_ctrl_c_ends_the_progress_bar_and_restores_the_terminal() -> None:
    with Screen([sys.executable, "-c", CTRL_C]) as screen:
        screen.wait_for("begun")
        screen.press("\x03")
        assert screen.ended() != 0
        assert screen.is_restored()
