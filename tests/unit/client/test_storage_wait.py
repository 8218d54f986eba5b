"""A member that begins waits for the storage of its job before it registers, and says so."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from strata.checkpoint.opening import refusal
from strata.checkpoint.transient import SILENT
from strata.client.storage_wait import ANSWER_S, FIRST_S, MOST_S, SAY_S, in_thread, wait_for_storage
from strata.errors import CheckpointNotFound, NotFound, StrataError, Unavailable
from strata.testing.virtual_time import in_virtual_time
from strata.v1.checkpoints_pb2 import Checkpoint, GetCheckpointResponse, Tier
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_RUNNING, GetJobRequest, GetJobResponse, Job

SAVED = Checkpoint(step=20, path="file:///data/job/step-20-gen-1-a")


class Coordinators:
    """They know one job, and its newest checkpoint."""

    def __init__(self, saved: Checkpoint | StrataError = SAVED) -> None:
        self.phase: Any = JOB_PHASE_RUNNING
        self.saved = saved

    async def call(self, request: Message, *, timeout_s: float, attempt_s: float) -> Any:
        if isinstance(self.saved, NotFound | Unavailable):
            raise self.saved
        if isinstance(request, GetJobRequest):
            return GetJobResponse(job=Job(name=request.job, phase=self.phase))
        if isinstance(self.saved, StrataError):
            raise self.saved
        return GetCheckpointResponse(checkpoint=self.saved)


class Disk:
    """Refuses as it is told; notes when it was tried."""

    def __init__(self, why: str = "disk full") -> None:
        self.why = why
        self.tried: list[tuple[float, str]] = []

    async def refuses(self, uri: str) -> str:
        self.tried.append((asyncio.get_running_loop().time(), uri))
        return self.why


class SilentDisk:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()

    async def __call__(self, uri: str) -> str:
        await self.answer.wait()
        return ""


class Words:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.over: list[str] = []


async def waited(unary: Coordinators, disk: Disk, words: Words, *, taken_up: bool = False) -> None:
    await wait_for_storage(
        unary,
        job="job",
        taken_up=taken_up,
        say=words.said.append,
        over=words.over.append,
        refuses=disk.refuses,
    )


@in_virtual_time()
async def test_it_waits_says_why_and_goes_on_once_there_is_space() -> None:
    disk, words = Disk(), Words()
    waiting = asyncio.create_task(waited(Coordinators(), disk, words))
    await asyncio.sleep(SAY_S + 2 * MOST_S)
    assert not waiting.done()
    first = "no checkpoint can be written to file:///data/job: disk full; waiting for that before it joins"
    assert words.said[0] == first
    assert words.said[1].startswith(f"{first}, for 5 min by now")
    assert len(words.said) == 2, "once in five minutes"
    disk.why = "storage answers 503"
    await asyncio.sleep(MOST_S)
    assert "storage answers 503" in words.said[2], "and when it is another reason"
    disk.why = ""
    await asyncio.wait_for(waiting, MOST_S + 1)
    assert words.over == [
        "waited 7 min for the storage (file:///data/job: storage answers 503), and joins now"
    ]
    gaps = [round(b[0] - a[0]) for a, b in zip(disk.tried, disk.tried[1:], strict=False)]
    assert gaps[:7] == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    "saved",
    [
        NotFound("no such job"),
        Unavailable("nobody answers"),
        CheckpointNotFound("nothing is saved"),
        Checkpoint(step=20, path="file:///data/other/step-20", origin_job="other"),
    ],
    ids=lambda saved: type(saved).__name__,
)
def test_without_a_checkpoint_of_its_own_it_does_not_wait(saved: Checkpoint | StrataError) -> None:
    @in_virtual_time()
    async def run() -> None:
        disk, words = Disk(), Words()
        await waited(Coordinators(saved), disk, words)
        assert (disk.tried, words.said, words.over) == ([], [], [])

    run()


@in_virtual_time()
async def test_it_waits_no_more_for_a_job_that_others_finish() -> None:
    unary, disk, words = Coordinators(), Disk(), Words()
    waiting = asyncio.create_task(waited(unary, disk, words))
    await asyncio.sleep(10)
    unary.phase = JOB_PHASE_DONE
    await asyncio.wait_for(waiting, MOST_S)
    again = asyncio.create_task(waited(unary, disk, words, taken_up=True))
    await asyncio.sleep(10)
    assert not again.done(), "it goes on with this member"
    again.cancel()


@pytest.mark.parametrize("silent", [False, True])
def test_after_the_grace_it_joins_all_the_same_and_says_so(silent: bool) -> None:
    """The job may save elsewhere by now: nobody knows of that before it has."""

    @in_virtual_time()
    async def run() -> None:
        words, began_s = Words(), asyncio.get_running_loop().time()
        waiting = wait_for_storage(
            Coordinators(),
            job="job",
            taken_up=False,
            say=words.said.append,
            over=words.over.append,
            limit_s=100.0,
            refuses=SilentDisk() if silent else Disk().refuses,
        )
        await asyncio.wait_for(waiting, 130)
        assert round(asyncio.get_running_loop().time() - began_s) == (120 if silent else 100)
        why = SILENT if silent else "disk full"
        told = f"no checkpoint can be written to file:///data/job: {why}; it joins all the same, after 100 s"
        assert (words.said[-1], words.over) == (told, [])

    run()


@pytest.mark.parametrize("far", ["", "storage answers 503"])
def test_it_waits_only_where_no_copy_can_be_written(far: str) -> None:
    saved = Checkpoint(
        path="file:///data/job/step-20",
        tiers=[Tier(path="file:///data/job/step-20"), Tier(path="s3://b/job/step-20")],
    )

    @in_virtual_time()
    async def run() -> None:
        words, tried = Words(), list[str]()

        async def refuses(uri: str) -> str:
            tried.append(uri)
            return far if uri.startswith("s3") else "disk full"

        waiting = asyncio.ensure_future(
            wait_for_storage(
                Coordinators(saved),
                job="job",
                taken_up=False,
                say=words.said.append,
                over=words.over.append,
                refuses=refuses,
            )
        )
        await asyncio.sleep(0.5)
        assert tried == ["file:///data/job", "s3://b/job"], "each once"
        assert waiting.done() == (not far)
        both = "to file:///data/job: disk full; s3://b/job: storage answers 503; waiting"
        assert [both in said for said in words.said] == ([True] if far else [])
        waiting.cancel()

    run()


@in_virtual_time()
async def test_the_end_of_the_job_ends_a_wait_for_a_storage_that_never_answers() -> None:
    unary, words = Coordinators(), Words()
    waiting = asyncio.create_task(
        wait_for_storage(
            unary,
            job="job",
            taken_up=False,
            say=words.said.append,
            over=words.over.append,
            refuses=SilentDisk(),
        )
    )
    await asyncio.sleep(ANSWER_S + 1)
    unary.phase = JOB_PHASE_DONE
    await asyncio.wait_for(waiting, ANSWER_S + FIRST_S)


# -- the probe


def test_a_folder_that_takes_what_is_written_keeps_nothing_of_it(tmp_path: Path) -> None:
    assert refusal(tmp_path.as_uri(), nonce=lambda: "n") == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert refusal(gone.as_uri(), nonce=lambda: "n") == ""
    assert not gone.exists()


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.ENOSPC, "disk full"),
        (errno.EDQUOT, "disk quota used up"),
        (errno.EACCES, ""),
        (errno.EROFS, ""),
    ],
    ids=errno.errorcode.get,
)
def test_only_what_time_may_heal_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, why: str
) -> None:
    def fails(_fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    assert refusal(tmp_path.as_uri(), nonce=lambda: "n") == why
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uri", ["", "ftp://host/x", "file:///a?b"])
def test_what_names_no_storage_is_not_waited_for(uri: str) -> None:
    assert refusal(uri, nonce=lambda: "n") == ""


async def test_a_storage_that_does_not_answer_keeps_nobody_from_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "hangs"
    os.mkfifo(fifo)
    hang: Callable[[int], None] = lambda _fd: fifo.open("rb").close()  # noqa: E731  # until somebody writes
    monkeypatch.setattr(os, "fsync", hang)
    probing = asyncio.create_task(in_thread(tmp_path.as_uri()))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(probing), 0.3)
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing
    monkeypatch.undo()
    fifo.open("wb").close()


@in_virtual_time()
async def test_a_storage_that_does_not_answer_is_said_to_be_waited_for() -> None:
    disk, words = SilentDisk(), Words()
    waiting = asyncio.create_task(
        wait_for_storage(
            Coordinators(),
            job="job",
            taken_up=False,
            say=words.said.append,
            over=words.over.append,
            refuses=disk,
        )
    )
    await asyncio.sleep(ANSWER_S + 1)
    assert ["storage does not answer" in said for said in words.said] == [True]
    disk.answer.set()
    await waiting
    assert len(words.over) == 1


async def test_a_look_that_fails_is_an_error_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(uri: str, *, nonce: Callable[[], str]) -> str:
        raise RuntimeError(f"a bug, at {uri}")

    monkeypatch.setattr("strata.checkpoint.opening.refusal", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(in_thread(tmp_path.as_uri()), 10)


@in_virtual_time()
async def test_without_a_grace_no_storage_is_asked() -> None:
    disk, said = Disk(), list[str]()
    await wait_for_storage(
        Coordinators(),
        job="job",
        taken_up=False,
        say=said.append,
        over=said.append,
        limit_s=0.0,
        refuses=lambda uri: disk.refuses(uri),  # noqa: PLW0108  # as a caller's own
    )
    assert (said, disk.tried) == ([], [])
