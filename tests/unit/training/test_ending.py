"""What a process does once its generation has ended."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from google.protobuf.message import Message

from strata.errors import JobDone, StaleGeneration, StaleIncarnation, StrataError
from strata.training.ending import InProcessEnding, LoneEnding, NeverEnds, SupervisedEnding, end_with_agent
from strata.v1.session_pb2 import RankPlace, WorldUpdate
from strata.v1.worlds_pb2 import (
    JOB_PHASE_DONE,
    JOB_PHASE_RUNNING,
    STOP_ACTION_DRAIN,
    STOP_ACTION_PREEMPT,
    StopJobRequest,
    StopJobResponse,
    StopNotice,
    World,
)
from tests.unit.training.room import LIMIT_S, Room, RoomRank

ROOT = Path(__file__).resolve().parents[3]
STALE = StaleGeneration("the world is generation 2")


def hear(room: Room, generation: int, *, done: bool = False) -> None:
    phase = JOB_PHASE_DONE if done else JOB_PHASE_RUNNING
    for callback in list(room.observers.get(0, [])):
        callback(WorldUpdate(world=World(generation=generation), phase=phase))


class Again:
    """Takes the place of a new program: tells that it was run."""

    def __init__(self) -> None:
        self.ran = threading.Event()
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self.ran.set()


def test_a_lone_member_leaves_and_runs_anew_once_it_is_armed() -> None:
    room, again = Room(1), Again()
    peers = room.rank(0)
    ending = LoneEnding(peers, detect_s=0.0, again=again)
    hear(room, 1)
    ending.arm()
    before = peers.left
    assert before is None
    hear(room, 2)
    hear(room, 3)
    assert again.ran.wait(LIMIT_S)
    assert peers.left is not None
    assert peers.left[0] == 1
    assert "generation 2 began" in peers.left[1]
    assert again.count == 1


def test_a_newer_world_that_came_before_counts_when_it_is_armed() -> None:
    room, again = Room(1), Again()
    ending = LoneEnding(room.rank(0), detect_s=0.0, again=again)
    hear(room, 2)
    assert not ending.armed
    ending.over(STALE)  # returns at once: whoever is not armed adopts the newer world
    assert not again.count
    ending.arm()
    assert again.ran.wait(LIMIT_S)


class Drained(RoomRank):
    """A rank whose coordinators take note of what it asks for."""

    def __init__(self, room: Room) -> None:
        super().__init__(room, 0)
        self.requests: list[Message] = []

    def call(self, request: Message, *, timeout_s: float = 0.0) -> StopJobResponse:
        self.requests.append(request)
        return StopJobResponse()


@pytest.mark.parametrize(
    "how", ["a signal, with a place", "a signal, without a place", "preempted", "drained"]
)
def test_a_lone_member_that_is_to_leave_is_drained_and_leaves(how: str) -> None:
    room, again, gone = Room(2), Again(), Again()
    peers = Drained(room)
    ending = LoneEnding(peers, detect_s=0.0, again=again, gone=gone)
    ending.arm()
    assert ending.leaves, "and nobody has to end it"
    update = WorldUpdate(world=World(generation=2), phase=JOB_PHASE_RUNNING)
    if how.startswith("a signal"):
        ending.leave_then("SIGTERM to it")
        ending.leave_then("SIGTERM again")
    else:
        action = STOP_ACTION_PREEMPT if how == "preempted" else STOP_ACTION_DRAIN
        named = [] if how == "preempted" else ["w7", "w0"]
        update.notice.CopyFrom(StopNotice(generation=2, action=action, reason="as asked", worker_ids=named))
    if how == "a signal, with a place":
        update.place.first_rank = 1
    for callback in list(room.observers[0]):
        callback(update)
    assert gone.ran.wait(LIMIT_S)
    why = "SIGTERM to it" if how.startswith("a signal") else "as asked"
    assert peers.left == (75, why)
    assert not again.count
    asked = StopJobRequest(job="j", action=STOP_ACTION_DRAIN, worker_ids=["w0"], reason=why)
    assert peers.requests == ([asked] if update.HasField("place") else [])


def test_a_lone_member_is_not_meant_by_what_others_are_asked_for() -> None:
    room, again, gone = Room(2), Again(), Again()
    ending = LoneEnding(room.rank(0), detect_s=0.0, again=again, gone=gone)
    ending.arm()
    drain = StopNotice(generation=2, action=STOP_ACTION_DRAIN, worker_ids=["w7"])
    for callback in list(room.observers[0]):
        callback(WorldUpdate(world=World(generation=2), phase=JOB_PHASE_RUNNING, notice=drain))
    assert again.ran.wait(LIMIT_S)
    assert not gone.count


@pytest.mark.parametrize("how", ["closed", "done"])
def test_who_is_done_runs_nothing_anew(how: str) -> None:
    room, again = Room(1), Again()
    ending = LoneEnding(room.rank(0), detect_s=0.0, again=again)
    ending.arm()
    if how == "closed":
        ending.close()
    hear(room, 2, done=how == "done")
    assert not again.ran.wait(0.05)
    assert not room.observers[0] or how == "done"


def test_a_rank_waits_for_its_agent() -> None:
    SupervisedEnding(Room(1).rank(0), patience_s=0.0).over(STALE)
    NeverEnds().over(STALE)


@pytest.mark.parametrize(
    ("error", "ends"),
    [(StaleIncarnation("the agent has ended"), True), (StaleGeneration("generation 2 runs"), False)],
)
def test_a_process_ends_with_its_agent_whatever_its_main_thread_does(error: StrataError, ends: bool) -> None:
    room, gone = Room(1), Again()
    forget = end_with_agent(room.rank(0), gone)
    for callback in tuple(room.end_observers):
        callback(error)
    assert gone.ran.wait(LIMIT_S if ends else 0.05) is ends
    forget()
    assert not room.end_observers


def test_a_training_that_is_over_outlives_its_agent() -> None:
    room = Room(1)
    for kind in (SupervisedEnding, InProcessEnding):
        ending = kind(room.rank(0))
        assert room.end_observers
        ending.close()
        assert not room.end_observers


def test_in_process_the_place_is_waited_for() -> None:
    room = Room(1)
    peers = room.rank(0)
    ending = InProcessEnding(peers)
    ending.check()
    assert not ending.wait_over(0.0)
    hear(room, 2)
    assert ending.wait_over(0.0)
    with pytest.raises(StaleGeneration, match="this step is not to be taken"):
        ending.check()
    peers.place(RankPlace(world=World(generation=2), local_rank=1))
    assert ending.wait_place().local_rank == 1
    ending.close()
    assert not room.observers[0]


def test_a_failure_that_a_lost_peer_caused_is_none_of_its_own() -> None:
    room, again = Room(2), Again()
    ending = LoneEnding(room.rank(0), detect_s=0.0, again=again)
    waits = threading.Thread(
        target=ending.failed, args=(RuntimeError("connection closed by peer"),), daemon=True
    )
    waits.start()
    hear(room, 2)
    assert again.ran.wait(LIMIT_S)
    assert waits.is_alive(), "it waits for the new program to take its place"


DONE = JobDone("job j is done: all 1 ranks are done")


class Told(RoomRank):
    """A rank that was taken for lost, and whose session ends as it comes back: its job is done."""

    def check(self) -> None:
        raise DONE


@pytest.mark.parametrize("error", [STALE, DONE, RuntimeError("connection closed by peer")])
def test_a_lone_member_learns_that_its_job_was_done_without_it(error: Exception) -> None:
    room, again = Room(2), Again()
    peers = room.rank(0) if error is STALE else Told(room, 0)
    ending = LoneEnding(peers, detect_s=LIMIT_S, again=again)
    ending.arm()
    if error is STALE:
        hear(room, 2, done=True)
    with pytest.raises(JobDone, match="job j is done"):
        ending.over(STALE) if error is STALE else ending.failed(error)
    assert not again.count


@pytest.mark.parametrize("error", [RuntimeError("its own"), JobDone("job other is done")])
def test_a_failure_of_its_own_is_none_less_because_a_job_is_done(error: Exception) -> None:
    room = Room(1)
    peers = room.rank(0) if isinstance(error, JobDone) else Told(room, 0)
    LoneEnding(peers, detect_s=LIMIT_S, again=Again()).failed(error)


def test_a_failure_alone_and_an_interruption_are_its_own() -> None:
    again = Again()
    LoneEnding(Room(1).rank(0), detect_s=0.0, again=again).failed(RuntimeError())
    LoneEnding(Room(2).rank(0), detect_s=0.0, again=again).failed(KeyboardInterrupt())
    assert not again.count


PROGRAM = """
import multiprocessing, os, socket, stat, sys, threading, time
from strata.training.ending import execute_again

def child():
    time.sleep(1000)

def kinds():
    for number in map(int, os.listdir("/proc/self/fd")):  # what a test gives has any number
        if number < 3:
            continue
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            continue
        yield "socket" if stat.S_ISSOCK(mode) else "pipe" if stat.S_ISFIFO(mode) else "other"

if __name__ == "__main__":
    first = "AGAIN" not in os.environ
    print("pid", os.getpid(), os.getcwd(), sys.argv[1:], sys.flags.utf8_mode, first, flush=True)
    if first:
        os.environ["AGAIN"] = "1"
        os.chdir("/")
        worker = multiprocessing.get_context("fork").Process(target=child, daemon=True)
        worker.start()
        print("child", worker.pid, flush=True)
        as_gloo_does = socket.socket()
        os.set_inheritable(as_gloo_does.fileno(), True)
        for as_the_store_does in os.pipe():
            os.set_inheritable(as_the_store_does, True)
        threading.Thread(target=execute_again, daemon=True).start()
        time.sleep(1000)
    print("open", sorted(kinds()), flush=True)
"""


def test_a_program_runs_anew_with_its_arguments_in_its_folder_and_without_its_children(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    argv = [sys.executable, "-X", "utf8", program.name, "--steps", "3"]
    kept, low = os.pipe()
    given = fcntl.fcntl(low, fcntl.F_DUPFD, 200)
    with os.fdopen(kept), os.fdopen(low, "wb"), os.fdopen(given, "wb"):
        run = subprocess.run(
            argv,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=True,
            pass_fds=[given],
        )
    said = run.stdout.split("\n")
    first, child, second = said[0].split(), said[1].split(), said[2].split()
    assert first[:-1] == second[:-1]
    assert second[2] == str(tmp_path), "the folder in which it was started"
    assert (first[-1], second[-1]) == ("True", "False")
    assert "['--steps', '3']" in said[2]
    assert said[3] == "open ['pipe']", "what it was given, and nothing of its own"
    assert not Path(f"/proc/{child[1]}").exists()
