"""The console that ranks and the agent share: whole lines, a prefix before each, progress bars, and no lost output."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import select
import threading
import time

import pytest
from structlog.testing import capture_logs

from strata.launch.console import MAX_LINE, MAX_WAITING, TAKEN_S, Console, ConsoleText, Lines, QueuedText


class Piped:
    """A console on a pipe. A thread reads its output, from the start unless `read` is False."""

    def __init__(self, *, read: bool = True) -> None:
        self._ours, self.theirs = os.pipe()
        self.console = Console(self.theirs, {})
        self._read: list[bytes] = []
        self._reader = threading.Thread(target=self._listen, daemon=True)
        if read:
            self.read()

    def read(self) -> None:
        self._reader.start()

    def fill(self) -> None:
        """Fill the pipe, as if it had no reader."""
        os.set_blocking(self.theirs, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.theirs, b"x" * 4096)
        os.set_blocking(self.theirs, True)

    def full(self) -> bool:
        return not select.select([], [self.theirs], [], 0)[1]

    def written(self) -> bytes:
        os.close(self.theirs)
        self._reader.join(10)
        return self._read[0]

    def _listen(self) -> None:
        with os.fdopen(self._ours, "rb") as file:
            self._read.append(file.read())


def through(*pieces: bytes) -> bytes:
    """Return the console's output for a rank that writes `pieces`."""
    piped, lines = Piped(), Lines()
    for piece in pieces:
        piped.console.write(lines, b"[rank 3] ", lines.feed(piece))
    piped.console.write(lines, b"[rank 3] ", lines.rest())
    return piped.written()


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ((b"one\ntwo\n",), b"[rank 3] one\n[rank 3] two\n"),
        ((b"o", b"n", b"e\ntw", b"o\n"), b"[rank 3] one\n[rank 3] two\n"),
        ((b"last without an end",), b"[rank 3] last without an end"),
        ((b"\n\n",), b"[rank 3] \n[rank 3] \n"),
        ((b"dos\r", b"\nend\r\n"), b"[rank 3] dos\r\n[rank 3] end\r\n"),
        ((b"\r 1%", b"\r 2%", b"\r 3%\n"), b"[rank 3]  1%\r[rank 3]  2%\r[rank 3]  3%\n"),
        ((b"1%\r", b"2%\r", b"done\n"), b"[rank 3] 1%\r[rank 3] 2%\r[rank 3] done\n"),
        ((b"\0\xff\x1b[2\n\xfe",), b"[rank 3] \0\xff\x1b[2\n[rank 3] \xfe"),
        ((), b""),
    ],
)
def test_each_line_of_a_rank_has_its_prefix(pieces: tuple[bytes, ...], shown: bytes) -> None:
    assert through(*pieces) == shown


def test_however_a_stream_is_cut_its_lines_are_the_same() -> None:
    rng = random.Random(7)
    whole = b"".join(rng.choice([b"word", b"\n", b"\r\n", b"\r", b"\xff\0", b"x"]) for _ in range(2000))
    expected = through(whole)
    for number in range(20):
        cuts = sorted(rng.sample(range(len(whole)), 30 * (number + 1)))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert through(*pieces) == expected


def test_a_line_without_an_end_is_passed_on_in_parts_and_whole() -> None:
    lines, size = Lines(), 0
    for _ in range(100):
        passed = lines.feed(b"x" * 10_000)
        size += len(passed)
        assert not passed or len(passed) > MAX_LINE
    assert size + len(lines.rest()) == 1_000_000
    assert through(*(b"y" * 50_000 for _ in range(5)), b"\n") == b"[rank 3] " + b"y" * 250_000 + b"\n"


def test_lines_of_several_ranks_never_stand_within_one_another() -> None:
    piped = Piped()

    def rank(number: int) -> None:
        lines, prefix = Lines(), piped.console.prefix(number)
        for line in range(500):
            text = b"%d of %d " % (line, number) + b"z" * 5000 + b"\n"
            for at in range(0, len(text), 1700):
                piped.console.write(lines, prefix, lines.feed(text[at : at + 1700]))

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    written = piped.written()
    for number in range(4):
        mine = [line for line in written.splitlines() if line.startswith(b"[rank %d] " % number)]
        assert mine == [b"[rank %d] %d of %d " % (number, n, number) + b"z" * 5000 for n in range(500)]


def test_an_unfinished_line_is_ended_before_another_writer_starts_its_own() -> None:
    piped = Piped()
    one, other = object(), object()
    piped.console.write(one, b"[rank 0] ", b"begun")
    piped.console.write(other, b"[rank 1] ", b"whole\n")
    piped.console.write(one, b"[rank 0] ", b" and ended\n")
    piped.console.write(one, b"[rank 0] ", b"50 %\r")
    ConsoleText(piped.console).write("the agent speaks\n")
    assert piped.written() == (
        b"[rank 0] begun\n[rank 1] whole\n[rank 0]  and ended\n[rank 0] 50 %\r\nthe agent speaks\n"
    )


def test_on_a_terminal_another_line_takes_the_place_of_a_progress_bar() -> None:
    ours, theirs = pty.openpty()
    try:
        console = Console(theirs, {"NO_COLOR": "1"})
        one, other = object(), object()
        console.write(one, console.prefix(0), b"\r 1%")
        console.write(one, console.prefix(0), b"\r 2%")
        console.write(other, console.prefix(1), b"loss 3\n")
        console.write(one, console.prefix(0), b"\r 3%")
        console.write(other, console.prefix(1), b"loss 2\n")
        console.write(one, console.prefix(0), b"\n")  # this line end must not lose the bar's last state
        shown = b""
        while not shown.endswith(b" 3%\r\n"):
            shown += os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    assert shown == (
        b"\x1b[K[rank 0]  1%\r\x1b[K[rank 0]  2%"
        b"\r\x1b[K\x1b[K[rank 1] loss 3\r\n"
        b"\x1b[K[rank 0]  3%\r\x1b[K\x1b[K[rank 1] loss 2\r\n"
        b"\x1b[K[rank 0]  3%\r\n"
    )


def test_prefixes_have_colours_on_a_terminal_that_wants_them() -> None:
    ours, theirs = pty.openpty()
    try:
        assert Console(theirs, {"TERM": "xterm"}).prefix(3) == b"\x1b[K\x1b[35m[rank 3]\x1b[0m "
        assert Console(theirs, {"TERM": "dumb"}).prefix(3) == b"\x1b[K[rank 3] "
    finally:
        os.close(ours)
        os.close(theirs)
    piped = Piped()
    assert piped.console.prefix(3) == b"[rank 3] "
    piped.written()


def test_output_to_a_closed_reader_is_dropped() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    Console(theirs, {}).write(object(), b"", b"to nobody\n")
    os.close(theirs)


def test_this_process_itself_never_waits_for_a_slow_reader_and_its_lines_keep_their_order() -> None:
    piped = Piped(read=False)
    console, stop = piped.console, threading.Event()

    def rank() -> None:
        while not stop.is_set():
            console.write(rank, b"[rank 0] ", b"x" * 60_000 + b"\n")

    training = threading.Thread(target=rank, daemon=True)
    training.start()
    while not piped.full():
        time.sleep(0.01)
    own = QueuedText(console)
    began = time.monotonic()
    for number in range(300):
        own.write(f"line {number}\n")
    assert time.monotonic() - began < 0.5
    stop.set()
    piped.read()
    own.close()
    own.write("the last\n")
    training.join(10)
    lines = [line for line in piped.written().splitlines() if not line.startswith(b"[rank 0]")]
    assert lines == [*(b"line %d" % number for number in range(300)), b"the last"]


def test_of_too_many_lines_the_oldest_are_dropped_and_counted() -> None:
    piped = Piped(read=False)
    piped.fill()
    own = QueuedText(piped.console)
    count = MAX_WAITING + 5
    with capture_logs() as logs:
        for number in range(count):
            own.write(f"line {number}\n")
        piped.read()
        own.close()
    shown = piped.written().lstrip(b"x").splitlines()
    assert shown[-MAX_WAITING:] == [b"line %d" % number for number in range(5, count)]
    assert [(each["event"], each["lines"]) for each in logs] == [("output.dropped", count - len(shown))]


def test_closing_waits_only_briefly_for_a_reader_that_does_not_read() -> None:
    piped = Piped(read=False)
    piped.fill()
    own = QueuedText(piped.console)
    own.write("to nobody\n")
    began = time.monotonic()
    own.close()
    assert 0.9 * TAKEN_S < time.monotonic() - began < TAKEN_S + 2.0
    piped.read()
    piped.written()


def test_a_descriptor_that_does_not_block_loses_nothing() -> None:
    piped = Piped()
    os.set_blocking(piped.theirs, False)
    piped.console.write(object(), b"", b"x" * 1_000_000)
    assert piped.written() == b"x" * 1_000_000
