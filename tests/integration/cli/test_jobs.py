"""Operators' requests about a job, by command line and library, on a real cluster: scale, stop, resume, history.

The members are kept alive by unary heartbeats, so that the test can act as their ranks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from strata.client import CoordinatorClient
from strata.core.stop.last_step import BEGIN_BARRIER
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import InvalidArgument, NotFound, Refused
from strata.v1.barriers_pb2 import Arrival, WaitBarrierRequest
from strata.v1.members_pb2 import HeartbeatRequest, HeartbeatResponse, ReportRankExitRequest
from strata.v1.worlds_pb2 import (
    JOB_PHASE_PAUSED,
    JOB_PHASE_RUNNING,
    STOP_ACTION_DRAIN,
    STOP_ACTION_PREEMPT,
    GetJobRequest,
    GetJobResponse,
    Job,
    JobSpec,
)
from tests.cluster_fixtures import run_strata


class Play:
    """Members w-1 … of one job, kept alive by heartbeats; the test decides when their ranks end."""

    def __init__(self, endpoints: str, job: str) -> None:
        self.endpoints = endpoints
        self.job = job
        self.client = CoordinatorClient.connect(endpoints, job=job, timeout_s=20)
        self.incarnations: dict[str, int] = {}
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat)

    def __enter__(self) -> Play:
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._beats.join()
        self.client.close()

    def _beat(self) -> None:
        while not self._over.wait(0.5):
            for worker in list(self.incarnations):
                try:
                    self.heartbeat(worker)
                except NotFound:
                    self.incarnations.pop(worker, None)

    def join(self, worker: str, **spec: int) -> None:
        limits = JobSpec(min_workers=1, max_workers=2, settle_s=0.1)
        for name, value in spec.items():
            setattr(limits, name, value)
        answer = self.client.register(worker_id=worker, spec=limits)
        self.incarnations[worker] = answer.incarnation

    def heartbeat(self, worker: str) -> HeartbeatResponse:
        request = HeartbeatRequest(
            job=self.job, worker_id=worker, boot=self.client.boot, incarnation=self.incarnations[worker]
        )
        answer: HeartbeatResponse = self.client.call(request)
        return answer

    def leaves(self, worker: str) -> None:
        del self.incarnations[worker]
        self.client.leave(worker_id=worker)

    def ends(self, worker: str, rank: int, code: int, generation: int) -> None:
        request = ReportRankExitRequest(
            job=self.job,
            worker_id=worker,
            incarnation=self.incarnations[worker],
            generation=generation,
            rank=rank,
            code=code,
        )
        self.client.call(request)

    def begin(self, generation: int, *workers: str) -> None:
        """Make these workers' ranks pass the begin barrier.

        A stop waits only for ranks that have passed this barrier.
        """

        def wait(rank: int, worker: str) -> None:
            arrival = Arrival(job=self.job, name=BEGIN_BARRIER, generation=generation, round=1, ranks=[rank])
            self.client.call(
                WaitBarrierRequest(worker_id=worker, incarnation=self.incarnations[worker], arrival=arrival)
            )

        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(wait, range(len(workers)), workers))

    def until(self, accept: Callable[[Job], bool]) -> Job:
        def met(answer: GetJobResponse) -> bool:
            return accept(answer.job)

        answer: GetJobResponse = self.client.call_until(GetJobRequest(job=self.job), met)
        assert accept(answer.job), answer.job
        return answer.job


@pytest.fixture
def play(cluster: LocalCluster, job: str) -> Iterator[Play]:
    with Play(cluster.endpoints, job) as playing:
        yield playing


def typed(play: Play, *words: str, code: int = 0) -> str:
    got, output = run_strata("jobs", words[0], play.job, *words[1:], "--endpoints", play.endpoints)
    assert got == code, output
    return output


def as_json(play: Play, *words: str) -> Any:
    """Return the JSON that a command prints on stdout, without its messages on stderr while it waits."""
    output = typed(play, *words, "--json").splitlines()
    return json.loads("\n".join(line for line in output if not line.startswith("waiting: ")))


@pytest.mark.journey
def test_a_job_is_scaled_up_and_down(play: Play) -> None:
    play.join("w-1", max_workers=1)
    play.join("w-2")
    play.until(lambda job: job.world.members == 1)
    assert "takes 1 to 2 members" in typed(play, "scale", "--max-workers", "2", "--wait")
    assert play.until(lambda job: job.world.members == 2).world.reason == "1 more members have settled"
    down = as_json(play, "scale", "--max-workers", "1", "--wait")
    assert down["world"]["members"] == 1
    assert play.until(lambda job: list(job.standbys) == ["w-2"]).spec.max_workers == 1
    assert "must be" in typed(play, "scale", "--min-workers", "3", code=2)
    typed(play, "scale", code=2)
    history = as_json(play, "history")
    assert [each["world"]["members"] for each in history] == [1, 2, 1]
    assert "the job takes 1 members now" in typed(play, "history", "--limit", "1")


def test_a_preempted_member_leaves_and_the_job_continues_with_a_standby(play: Play) -> None:
    play.join("w-1", max_workers=1)
    play.until(lambda job: job.world.members == 1)
    play.begin(1, "w-1")
    output = typed(play, "preempt", "--grace-s", "120", "--reason", "the node is needed")
    assert f"generation 1 of {play.job} is requested to stop within 120 s" in output
    answer = play.heartbeat("w-1")
    assert (answer.notice.action, answer.notice.generation) == (STOP_ACTION_PREEMPT, 1)
    assert "stopping" in typed(play, "show")
    play.ends("w-1", 0, 75, 1)
    forming = play.until(lambda job: job.world.forming)
    assert "preempted: the node is needed" in forming.world.reason
    assert forming.phase == JOB_PHASE_RUNNING
    answer = play.heartbeat("w-1")
    assert (answer.notice.action, answer.notice.generation) == (STOP_ACTION_PREEMPT, 2), "it shall leave"
    assert [(m.worker_id, m.leaving) for m in play.client.members()] == [("w-1", True)]
    code, output = run_strata("members", "--job", play.job, "--endpoints", play.endpoints)
    assert (code, "leaving" in output) == (0, True)
    play.leaves("w-1")
    play.join("w-2")
    job = play.until(lambda job: job.world.members == 1)
    assert job.world.generation == 3
    assert not play.heartbeat("w-2").HasField("notice")


@pytest.mark.journey
def test_a_drained_worker_leaves_and_the_others_continue(play: Play) -> None:
    play.join("w-1", min_workers=1)
    play.join("w-2")
    generation = play.until(lambda job: job.world.members == 2).world.generation
    play.begin(generation, "w-1", "w-2")
    typed(play, "drain", "nobody", code=4)
    notice = play.client.stop("drain", worker_ids=["w-2"], reason="its fan is broken")
    assert notice is not None
    assert (notice.action, list(notice.worker_ids)) == (STOP_ACTION_DRAIN, ["w-2"])
    assert notice.generation == generation
    assert "is requested to drain as well" in typed(play, "pause")
    play.ends("w-2", 1, 75, generation)
    play.until(lambda job: job.phase == JOB_PHASE_PAUSED)
    typed(play, "resume")
    job = play.until(lambda job: job.world.members == 1)
    assert (job.world.generation, list(job.standbys)) == (generation + 2, ["w-2"])
    with pytest.raises(Refused, match="stands by"):
        play.client.stop("drain", worker_ids=["w-2"])
    play.leaves("w-2")


@pytest.mark.journey
def test_a_job_is_paused_and_resumed(play: Play) -> None:
    play.join("w-1", max_workers=1)
    play.until(lambda job: job.world.members == 1)
    play.begin(1, "w-1")
    typed(play, "pause")
    assert "being paused" in typed(play, "resume", code=4)
    play.ends("w-1", 0, 75, 1)
    paused = play.until(lambda job: job.phase == JOB_PHASE_PAUSED)
    assert paused.world.forming
    assert as_json(play, "show")["phase"] == "paused"
    assert "generation 3 has 1 of 1 members" in typed(play, "resume", "--wait")
    typed(play, "pause", "--now", "--wait")
    assert play.client.job_status().phase == JOB_PHASE_PAUSED
    assert play.client.resume().phase == JOB_PHASE_RUNNING
    play.until(lambda job: job.world.members == 1)


def test_a_job_without_members_is_forgotten(play: Play) -> None:
    play.join("w-1", max_workers=1)
    play.until(lambda job: job.world.members == 1)
    assert "has 1 members: w-1" in typed(play, "delete", "--yes", code=4)
    play.leaves("w-1")
    assert "is forgotten" in typed(play, "delete", "--yes")
    assert "no job" in typed(play, "delete", "--yes", code=4)
    play.join("w-1", max_workers=1)
    assert play.until(lambda job: job.world.members == 1).world.generation == 1


def test_the_client_library_refuses_invalid_requests(play: Play) -> None:
    play.join("w-1", max_workers=1)
    with pytest.raises(InvalidArgument, match="no way to stop"):
        play.client.stop("halt")
    with pytest.raises(InvalidArgument):
        play.client.stop("preempt", grace_s=float("nan"))
    with pytest.raises(InvalidArgument):
        play.client.scale(min_workers=-1)
    with CoordinatorClient.connect(play.endpoints, job="no-such-job", timeout_s=10) as stranger:
        for ask in (stranger.resume, stranger.generations, lambda: stranger.stop("pause")):
            with pytest.raises(NotFound):
                ask()
