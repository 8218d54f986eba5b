"""A starting member waits for its job's storage before it registers, and reports the wait."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from google.protobuf.message import Message

from strata.agent.storage_wait import ANSWER_S, MOST_S, SAY_S, in_thread, wait_for_storage
from strata.checkpoint.save.retry import GRACE_S
from strata.checkpoint.storage.opening import refusal
from strata.checkpoint.storage.transient import SILENT
from strata.errors import CheckpointNotFound, NotFound, StrataError, Unavailable
from strata.testing.virtual_time import in_virtual_time
from strata.v1.checkpoints_pb2 import Checkpoint, GetCheckpointResponse, Tier
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_RUNNING, GetJobRequest, GetJobResponse, Job

if TYPE_CHECKING:
    from strata.transport.unary import UnaryClient

SAVED = Checkpoint(step=20, path="file:///data/job/step-20-gen-1-a")


class Coordinators:
    """Coordinators that know one job and its newest checkpoint."""

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


class Wait:
    """One member's wait. It records the member's messages and each try of a storage; `why` is the storage's error."""

    def __init__(self, saved: Checkpoint | StrataError = SAVED, *, why: str = "disk full") -> None:
        self.unary = Coordinators(saved)
        self.why: str | None = why
        """None if the storage does not answer."""
        self.tried: list[tuple[float, str]] = []
        self.printed: list[str] = []
        self.over: list[str] = []

    async def refuses(self, uri: str) -> str:
        self.tried.append((asyncio.get_running_loop().time(), uri))
        if self.why is None:
            await asyncio.get_running_loop().create_future()
        return self.why or ""

    def begun(self, *, taken_up: bool = False, **more: Any) -> asyncio.Task[None]:
        settings: dict[str, Any] = {"refuses": self.refuses, **more}
        waiting = wait_for_storage(
            cast("UnaryClient", self.unary),
            job="job",
            taken_up=taken_up,
            say=self.printed.append,
            over=self.over.append,
            **settings,
        )
        return asyncio.create_task(waiting)


@in_virtual_time()
async def test_an_agent_waits_for_disk_space_logs_why_and_then_joins() -> None:
    wait = Wait()
    waiting = wait.begun()
    await asyncio.sleep(SAY_S + 2 * MOST_S)
    assert not waiting.done()
    first = "no checkpoint can be written to file:///data/job: disk full; waiting for that before it joins"
    assert wait.printed[0] == first
    assert wait.printed[1].startswith(f"{first}, for 5 min by now")
    assert len(wait.printed) == 2, "once in five minutes"
    wait.why = "storage answers 503"
    await asyncio.sleep(MOST_S)
    assert "storage answers 503" in wait.printed[2], "and when it is another reason"
    wait.why = ""
    await asyncio.wait_for(waiting, MOST_S + 1)
    assert wait.over == [
        "waited 7 min for the storage (file:///data/job: storage answers 503), and joins now"
    ]
    gaps = [round(b[0] - a[0]) for a, b in zip(wait.tried, wait.tried[1:], strict=False)]
    assert gaps[:7] == [1, 2, 4, 8, 16, 30, 30]


@in_virtual_time()
@pytest.mark.parametrize(
    ("saved", "limit_s"),
    [
        (NotFound("no such job"), GRACE_S),
        (Unavailable("nobody answers"), GRACE_S),
        (CheckpointNotFound("nothing is saved"), GRACE_S),
        (Checkpoint(step=20, path="file:///data/other/step-20", origin_job="other"), GRACE_S),
        (SAVED, 0.0),
    ],
    ids=["no job", "nobody", "no checkpoint", "another job's", "no grace"],
)
async def test_an_agent_without_its_own_checkpoint_or_a_grace_probes_no_storage(
    saved: Checkpoint | StrataError, limit_s: float
) -> None:
    wait = Wait(saved)
    await wait.begun(limit_s=limit_s)
    assert (wait.tried, wait.printed, wait.over) == ([], [], [])


@in_virtual_time()
@pytest.mark.parametrize(("why", "within_s"), [("disk full", MOST_S), (None, ANSWER_S + MOST_S)])
async def test_the_agent_stops_waiting_for_storage_if_others_finish_the_job(
    why: str | None, within_s: float
) -> None:
    wait = Wait()
    wait.why = why
    waiting = wait.begun()
    await asyncio.sleep(10)
    wait.unary.phase = JOB_PHASE_DONE
    await asyncio.wait_for(waiting, within_s)
    again = wait.begun(taken_up=True)
    await asyncio.sleep(10)
    assert not again.done(), "it goes on with this member"
    again.cancel()


@in_virtual_time()
@pytest.mark.parametrize(("why", "after_s"), [("disk full", 100), (None, 121)])
async def test_an_agent_joins_after_the_grace_and_logs_it(why: str | None, after_s: int) -> None:
    """The job may save to another storage by now.

    The coordinators get the new storage only with the job's next checkpoint.
    """
    wait, began_s = Wait(), asyncio.get_running_loop().time()
    wait.why = why
    await asyncio.wait_for(wait.begun(limit_s=100.0), 130)
    assert round(asyncio.get_running_loop().time() - began_s) == after_s
    message = (
        f"no checkpoint can be written to file:///data/job: {why or SILENT}; it joins anyway, after 100 s"
    )
    assert (wait.printed[-1], wait.over) == (message, [])


@in_virtual_time()
async def test_an_unresponsive_storage_is_logged_as_the_reason_for_the_wait() -> None:
    wait = Wait()
    wait.why = None
    waiting = wait.begun()
    await asyncio.sleep(ANSWER_S + 0.5)
    assert ["storage does not answer" in message for message in wait.printed] == [True]
    wait.why = ""
    await waiting
    assert len(wait.over) == 1


@in_virtual_time()
@pytest.mark.parametrize("far", ["", "storage answers 503"])
async def test_the_agent_waits_only_if_no_copy_can_be_written(far: str) -> None:
    wait = Wait(
        Checkpoint(
            path="file:///data/job/step-20",
            tiers=[Tier(path="file:///data/job/step-20"), Tier(path="s3://b/job/step-20")],
        )
    )
    tried: list[str] = []

    async def refuses(uri: str) -> str:
        tried.append(uri)
        return far if uri.startswith("s3") else "disk full"

    waiting = wait.begun(refuses=refuses)
    await asyncio.sleep(0.5)
    assert tried == ["file:///data/job", "s3://b/job"], "each once"
    assert waiting.done() == (not far)
    both = "to file:///data/job: disk full; s3://b/job: storage answers 503; waiting"
    assert [both in message for message in wait.printed] == ([True] if far else [])
    waiting.cancel()


# -- the probe


def test_a_probe_of_a_writable_folder_leaves_no_file(tmp_path: Path) -> None:
    assert refusal(tmp_path.as_uri(), nonce=lambda: "n") == ""
    assert list(tmp_path.iterdir()) == []


def test_the_storage_check_does_not_create_a_missing_folder(tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    assert refusal(missing.as_uri(), nonce=lambda: "n") == ""
    assert not missing.exists()


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
def test_a_probe_reports_only_transient_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, why: str
) -> None:
    def fails(_fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    assert refusal(tmp_path.as_uri(), nonce=lambda: "n") == why
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uri", ["", "ftp://host/x", "file:///a?b"])
def test_an_invalid_storage_uri_is_not_waited_for(uri: str) -> None:
    assert refusal(uri, nonce=lambda: "n") == ""


async def test_a_probe_of_a_hanging_storage_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "hangs"
    os.mkfifo(fifo)
    hang: Callable[[int], None] = lambda _fd: fifo.open("rb").close()  # noqa: E731  # blocks until the FIFO has a writer
    monkeypatch.setattr(os, "fsync", hang)
    probing = asyncio.create_task(in_thread(tmp_path.as_uri()))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(probing), 0.3)
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing
    monkeypatch.undo()
    fifo.open("wb").close()


async def test_an_unexpected_probe_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(uri: str, *, nonce: Callable[[], str]) -> str:
        raise RuntimeError(f"a bug, at {uri}")

    monkeypatch.setattr("strata.checkpoint.storage.opening.refusal", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(in_thread(tmp_path.as_uri()), 10)
