"""`strata top` on a terminal: its keys, and the state of the terminal after it ends."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from strata.cli.top.terminal import split_keys
from tests.terminals import Screen

PROGRAM = (sys.executable, "-m", "tests.unit.cli.top_program")


def test_keys_open_sort_scroll_and_quit() -> None:
    with Screen(PROGRAM) as screen:
        screen.wait_for("cluster default")
        screen.wait_for("Enter open")
        screen.press("\r")
        screen.wait_for("1,206 of 10,000")  # the step advances every second
        screen.wait_for("rank 3 stands still")
        screen.press("s")
        screen.wait_for("s sort: WORKER ▲")
        screen.press("r")
        screen.wait_for("s sort: WORKER ▼")
        screen.press("\r")
        screen.wait_for("began in generation 3, exited with 1")
        screen.forget()
        screen.press("\x1b")
        screen.wait_for("s sort: WORKER ▼")
        screen.press("?")
        screen.wait_for("any key: back")
        screen.press("x")
        screen.forget()
        screen.press("\x1b")
        screen.wait_for("vision-transformer")
        screen.press("q")
        assert screen.ended() == 0
        assert screen.is_restored()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda each: each.name)
def test_a_signal_ends_top_and_restores_the_terminal(number: signal.Signals) -> None:
    with Screen(PROGRAM) as screen:
        screen.wait_for("Enter open")
        os.kill(screen.pid, number)
        assert screen.ended() == 128 + number
        assert screen.is_restored()


def test_ctrl_c_ends_top() -> None:
    with Screen(PROGRAM) as screen:
        screen.wait_for("Enter open")
        screen.press("\x03")
        assert screen.ended() == 130
        assert screen.is_restored()


def test_ctrl_z_restores_the_terminal_until_top_resumes() -> None:
    with Screen(PROGRAM) as screen:
        screen.wait_for("Enter open")
        screen.press("\x1a")
        screen.stopped()
        assert screen.is_restored()
        screen.forget()
        screen.go_on()
        screen.wait_for("Enter open")
        assert not screen.is_restored()
        screen.press("q")
        assert screen.ended() == 0
        assert screen.is_restored()


def test_an_error_leaves_the_terminal_as_before() -> None:
    with Screen((*PROGRAM, "broken")) as screen:
        screen.wait_for("Enter open")
        screen.press("\r")
        assert screen.ended() == 1
        assert "KeyError" in screen.text
        assert screen.is_restored()


def test_top_fills_a_smaller_window_after_a_resize() -> None:
    with Screen(PROGRAM, columns=120, rows=40) as screen:
        screen.wait_for("RANKS/ON")
        screen.forget()
        screen.resize(80, 10)
        os.kill(screen.pid, signal.SIGWINCH)
        screen.wait_for("1-4 of 4")
        assert "RANKS/ON" not in screen.text.rpartition("cluster default")[2]
        screen.press("q")
        assert screen.ended() == 0


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"j", ["j"]),
        (b"\x1b", ["esc"]),
        (b"\x1b[A\x1b[B", ["up", "down"]),
        (b"\x1bOA", ["up"]),
        (b"\x1b[5~x", ["pgup", "x"]),
        (b"\x1b[1;5Aq", ["q"]),  # an escape sequence of no supported key
        (b"\r\x7f", ["enter", "backspace"]),
        (b"\xc3\xa9", []),
    ],
)
def test_input_bytes_are_split_into_keys(data: bytes, keys: list[str]) -> None:
    assert split_keys(data) == keys
