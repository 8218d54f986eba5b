"""Framed messages over a real socket pair: the guarantees of a link, and its behaviour with a bad or slow peer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import (
    ConfigError,
    InvalidArgument,
    StaleGeneration,
    StrataError,
    TransportBroken,
    Unavailable,
)
from strata.session.framed import OUTBOX_LIMIT, FramedLink, challenged, dialled, newest_down, newest_up
from strata.session.link import MAX_MESSAGE_BYTES
from strata.v1.common_pb2 import Error
from strata.v1.session_pb2 import Down, Up

Accepted = FramedLink[Up, Down]
Dialled = FramedLink[Down, Up]


def up(**message: Any) -> Up:
    return Up(**message)


def leave(reason: str) -> Up:
    return up(leave={"reason": reason})


def world(generation: int) -> Down:
    return Down(world={"world": {"generation": generation}})  # type: ignore[arg-type]  # protobuf accepts dicts


def moved(address: str) -> Down:
    return Down(moved={"addresses": [address]})  # type: ignore[arg-type]  # as above


async def accepted(sock: socket.socket) -> Accepted:
    loop = asyncio.get_running_loop()
    _, link = await loop.connect_accepted_socket(lambda: Accepted(Up, newest_down), sock)
    return link


async def dialling(sock: socket.socket) -> Dialled:
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(
        lambda: Dialled(Down, newest_up, target="unix:/agent"), sock=sock
    )
    return link


@asynccontextmanager
async def both() -> AsyncIterator[tuple[Dialled, Accepted]]:
    ours, theirs = socket.socketpair()
    links = await dialling(ours), await accepted(theirs)
    try:
        yield links
    finally:
        for link in links:
            link.close()
        for link in links:
            await link.wait_closed()


class Raw:
    """The other side of a link, which reads and writes raw bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def frame(self) -> tuple[bool, bytes]:
        """Return whether the next frame is the last one, and its content."""
        (head,) = struct.unpack(">I", await self._exactly(4))
        return bool(head >> 31), await self._exactly(head & 0x7FFFFFFF)

    async def refusal(self) -> Error:
        last, words = await self.frame()
        assert last
        return Error.FromString(words)

    async def _exactly(self, count: int) -> bytes:
        read = b""
        while len(read) < count:
            more = await asyncio.get_running_loop().sock_recv(self._sock, count - len(read))
            assert more, "the link ended"
            read += more
        return read

    def close(self) -> None:
        self._sock.close()


@asynccontextmanager
async def raw() -> AsyncIterator[tuple[Raw, Accepted]]:
    ours, theirs = socket.socketpair()
    link, other = await accepted(theirs), Raw(ours)
    try:
        yield other, link
    finally:
        other.close()
        link.close()
        await link.wait_closed()


def framed(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


async def test_messages_arrive_in_order_both_ways() -> None:
    async with both() as (ours, theirs):
        for number in range(3):
            ours.send(leave(str(number)))
            theirs.send(moved(str(number)))
        for number in range(3):
            assert (await theirs.recv()) == leave(str(number))
            assert (await ours.recv()) == moved(str(number))
        assert ours.backlog == theirs.backlog == 0


async def test_a_message_of_the_largest_size_arrives_and_a_larger_one_ends_the_link() -> None:
    async with both() as (ours, theirs):
        largest = leave("x" * (MAX_MESSAGE_BYTES - 10))
        assert MAX_MESSAGE_BYTES - 5 < largest.ByteSize() <= MAX_MESSAGE_BYTES
        ours.send(largest)
        ours.send(leave("small"))
        assert (await theirs.recv()) == largest
        assert (await theirs.recv()) == leave("small")
        ours.send(leave("x" * MAX_MESSAGE_BYTES))
        assert await theirs.recv() is None
        with pytest.raises(StrataError, match="at most"):
            await ours.recv()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=300), max_size=12), st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_the_chunks_of_a_byte_stream_do_not_change_its_messages(reasons: list[str], cuts: list[int]) -> None:
    async def arrives() -> None:
        async with raw() as (other, link):
            stream = b"".join(framed(leave(reason).SerializeToString()) for reason in reasons)
            at, turn = 0, 0
            while at < len(stream):
                size = cuts[turn % len(cuts)]
                await other.write(stream[at : at + size])
                await asyncio.sleep(0)
                at, turn = at + size, turn + 1
            assert [await link.recv() for _ in reasons] == [leave(reason) for reason in reasons]

    asyncio.run(arrives())


async def test_a_frame_that_is_too_long_ends_its_link_with_the_reason() -> None:
    async with raw() as (other, link):
        await other.write(struct.pack(">I", MAX_MESSAGE_BYTES + 1))
        assert await link.recv() is None
        error = await other.refusal()
        assert (error.code, str(MAX_MESSAGE_BYTES + 1) in error.message) == ("INVALID_ARGUMENT", True)


async def test_an_undecodable_frame_ends_its_link_with_the_reason() -> None:
    async with raw() as (other, link):
        await other.write(framed(leave("before").SerializeToString()) + framed(b"\xff\xff\xff"))
        assert await link.recv() == leave("before")
        assert await link.recv() is None
        assert "is no Up" in (await other.refusal()).message


async def test_the_dialling_end_raises_the_error_of_an_invalid_message() -> None:
    ours, theirs = socket.socketpair()
    link, other = await dialling(ours), Raw(theirs)
    await other.write(framed(b"\xff\xff\xff"))
    with pytest.raises(InvalidArgument, match="is no Down"):
        await link.recv()
    other.close()
    await link.wait_closed()


async def test_an_undecodable_last_frame_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    link, other = await dialling(ours), Raw(theirs)
    await other.write(struct.pack(">I", 1 << 31 | 3) + b"\xff\xff\xff")
    with pytest.raises(InvalidArgument, match="last frame"):
        await link.recv()
    other.close()
    await link.wait_closed()


async def test_only_the_newest_world_and_progress_message_stay_queued() -> None:
    async with both() as (ours, theirs):
        for generation in (1, 2):
            theirs.send(world(generation))
        theirs.send(moved("a"))
        theirs.send(world(3))
        assert [await ours.recv() for _ in range(2)] == [moved("a"), world(3)]
        evidence = up(progress={"generation": 1, "evidence": [{"rank": 1}]})
        reports = [up(progress={"generation": 1, "ranks": [{"rank": 1, "step": step}]}) for step in range(3)]
        for message in (reports[0], evidence, reports[1], reports[2]):
            ours.send(message)
        assert [await theirs.recv() for _ in range(2)] == [evidence, reports[2]]


async def test_a_slow_reader_misses_only_outdated_worlds() -> None:
    async with raw() as (other, link):
        big = "x" * 100_000
        for number in range(20):
            link.send(moved(f"{number}{big}"))
            await asyncio.sleep(0)
        assert 0 < link.backlog < 20, "the socket is full"
        for generation in range(1, OUTBOX_LIMIT + 100):
            link.send(world(generation))
        assert link.backlog < 25
        got = [Down.FromString((await other.frame())[1]) for _ in range(21)]
        assert [down.moved.addresses[0] for down in got[:20]] == [f"{number}{big}" for number in range(20)]
        assert got[20] == world(OUTBOX_LIMIT + 99)
        assert link.backlog == 0


async def test_a_side_that_never_reads_loses_the_link_and_no_more() -> None:
    async with raw() as (_other, link):
        for number in range(OUTBOX_LIMIT + 10):
            link.send(moved(f"{number}" + "x" * 1000))
        assert await link.recv() is None
        link.send(moved("after the end"))
        async with asyncio.timeout(3):
            await link.wait_closed()


async def test_a_reader_that_is_behind_stops_the_sender() -> None:
    async with both() as (ours, theirs):
        big = "x" * 1_000_000
        for number in range(12):
            ours.send(leave(f"{number}{big}"))
            await asyncio.sleep(0.01)
        assert ours.backlog > 5, "what the other side holds unread is bounded"
        for number in range(12):
            message = await theirs.recv()
            assert message is not None
            assert message.leave.reason == f"{number}{big}"


async def test_messages_sent_before_the_close_arrive() -> None:
    async with both() as (ours, theirs):
        big = "x" * 1_000_000
        for number in range(5):
            theirs.send(moved(f"{number}{big}"))
        theirs.close()
        theirs.close(Unavailable("only the first call counts"))
        for number in range(5):
            assert (await ours.recv()) == moved(f"{number}{big}")
        assert await ours.recv() is None
        await theirs.wait_closed()


async def test_the_closing_error_reaches_a_client_that_is_sending() -> None:
    async with both() as (ours, theirs):
        ours.send(leave("never read"))
        theirs.close(StaleGeneration("generation 2 runs", hint="h"))
        for _ in range(3):
            ours.send(up(tick={}))
            await asyncio.sleep(0.01)
        with pytest.raises(StaleGeneration, match="generation 2 runs"):
            await ours.recv()
        assert await theirs.recv() is None


async def test_a_silent_side_holds_an_end_up_for_a_second_at_most() -> None:
    async with raw() as (_other, link):
        link.send(moved("x" * 1_000_000))
        link.close()
        began = asyncio.get_running_loop().time()
        await link.wait_closed()
        assert asyncio.get_running_loop().time() - began < 1.5


async def test_an_end_without_a_last_frame_is_a_broken_transport() -> None:
    async with raw() as (other, link):
        other.close()
        assert await link.recv() is None
    ours, theirs = socket.socketpair()
    dialler = await dialling(ours)
    theirs.close()
    with pytest.raises(TransportBroken):
        await dialler.recv()


async def test_the_nonce_comes_back_before_anything_else() -> None:
    ours, theirs = socket.socketpair()
    link = await accepted(theirs)
    holds = asyncio.create_task(challenged(link))
    async with dialled(ours, "unix:/agent") as other:
        other.send(leave("first"))
        assert await holds
        assert await link.recv() == leave("first")
        link.close()


async def test_a_wrong_nonce_fails_the_challenge() -> None:
    async with raw() as (other, link):
        holds = asyncio.create_task(challenged(link))
        _, nonce = await other.frame()
        await other.write(framed(bytes(len(nonce))))
        assert not await holds


async def test_a_refusal_in_place_of_the_nonce_is_raised() -> None:
    ours, theirs = socket.socketpair()
    link = await accepted(theirs)
    link.close(StaleGeneration("not here"))
    with pytest.raises(StaleGeneration, match="not here"):
        async with dialled(ours, "unix:/agent"):
            pass


async def test_a_late_reader_still_sees_a_clean_end() -> None:
    async with both() as (ours, theirs):
        theirs.send(moved("a"))
        theirs.close()
        assert await ours.recv() == moved("a")
        await asyncio.sleep(0.05)  # the socket is closed by now
        assert await ours.recv() is None


FORKING = """
import asyncio, os, sys, time
from strata.session.framed import connected, dialled

async def rank():
    async with dialled(connected(sys.argv[1]), "agent"):
        child = os.fork()
        if not child:
            time.sleep(60)
        os.write(1, b"%d\\n" % child)
        os._exit(0)

if sys.argv[2] == "uvloop":
    import uvloop
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
asyncio.run(rank())
"""

TWICE = """
import os, signal, sys
from strata.session.framed import connected

signal.alarm(10)
first, second = connected(sys.argv[1]), connected(sys.argv[1])
os.close(first.fileno())
if not os.fork():
    signal.alarm(10)
    os._exit(8 if os.waitstatus_to_exitcode(os.waitpid(os.fork() or os._exit(0), 0)[1]) else 7)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_end_of_a_process_closes_its_link_even_if_a_forked_child_lives(tmp_path: Path, loop: str) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        rank = subprocess.Popen(
            [sys.executable, "-c", FORKING, str(tmp_path / "s"), loop], stdout=subprocess.PIPE
        )
        served, _ = listener.accept()
        with served, rank:
            served.settimeout(10)
            served.sendall(framed(bytes(16)))
            child = 0
            try:
                assert rank.stdout is not None
                child = int(rank.stdout.readline())
                while served.recv(1000):
                    pass
                os.kill(child, 0)  # the child lives
            finally:
                if child:
                    os.kill(child, signal.SIGKILL)


def test_a_socket_closed_by_descriptor_number_does_not_block_a_fork(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        assert subprocess.run([sys.executable, "-c", TWICE, str(tmp_path / "s")], check=False).returncode == 7


async def test_a_forked_child_sends_nothing() -> None:
    async with both() as (ours, theirs):
        pid = os.fork()
        if not pid:
            try:
                ours.send(leave("of the child"))
            except ConfigError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7  # noqa: ASYNC222  # milliseconds
        ours.send(leave("of the parent"))
        assert await theirs.recv() == leave("of the parent")
