"""How a process ends or continues once its generation has ended."""

from __future__ import annotations

import builtins
import sys
import threading

import pytest
from google.protobuf.message import Message

from strata.errors import ClusterRestored, JobDone, StaleGeneration, StaleIncarnation, StrataError
from strata.training.generation_exit import (
    AgentExit,
    InProcessExit,
    NeverEnds,
    StandaloneExit,
    end_with_agent,
    exit_if_refused,
)
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

STALE = StaleGeneration("the world is generation 2")
RESTORED = ClusterRestored("this client began with cluster L; a:1 serves L.2.77aa")


def hear(room: Room, generation: int, *, done: bool = False) -> None:
    phase = JOB_PHASE_DONE if done else JOB_PHASE_RUNNING
    for callback in list(room.observers.get(0, [])):
        callback(WorldUpdate(world=World(generation=generation), phase=phase))


class Exited:
    """A stand-in for the end of the process, which records that it was called."""

    def __init__(self) -> None:
        self.ran = threading.Event()
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self.ran.set()


def test_an_armed_standalone_process_leaves_and_ends_at_a_newer_world(
    caplog: pytest.LogCaptureFixture,
) -> None:
    room, process_end = Room(1), Exited()
    context = room.rank(0)
    ending = StandaloneExit(context, detect_s=0.0, exit_process=process_end)
    hear(room, 1)
    ending.arm()
    before = context.left
    assert before is None
    hear(room, 2)
    hear(room, 3)
    assert process_end.ran.wait(LIMIT_S)
    assert context.left is not None
    assert context.left[0] == 75
    assert "generation 2 began" in context.left[1]
    assert process_end.count == 1
    assert "start it under `strata run` to have it restarted" in caplog.text


@pytest.mark.parametrize("where", ["a prompt", "a notebook"])
def test_in_an_interactive_session_nothing_ends_the_process(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "a prompt":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    else:
        monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    room, process_end = Room(1), Exited()
    context = room.rank(0)
    ending = StandaloneExit(context, detect_s=0.0, exit_process=process_end)
    ending.arm()
    hear(room, 2)
    assert not process_end.ran.wait(0.05)
    ending.over(STALE)
    assert context.left is not None, "so that it may call strata.init again"
    for ended in (StaleIncarnation("the agent has ended"), RESTORED):
        for callback in tuple(room.end_observers):
            callback(ended)
        ending.failed(ended)
    assert not process_end.ran.wait(0.05)


def test_a_newer_world_received_before_arming_ends_the_process_when_armed() -> None:
    room, process_end = Room(1), Exited()
    ending = StandaloneExit(room.rank(0), detect_s=0.0, exit_process=process_end)
    hear(room, 2)
    assert not ending.armed
    ending.over(STALE)  # returns immediately: a process that is not armed adopts the newer world
    assert not process_end.count
    ending.arm()
    assert process_end.ran.wait(LIMIT_S)


class Drained(RoomRank):
    """A rank whose coordinators record its requests."""

    def __init__(self, room: Room) -> None:
        super().__init__(room, 0)
        self.requests: list[Message] = []

    def call(self, request: Message, *, timeout_s: float = 0.0) -> StopJobResponse:
        self.requests.append(request)
        return StopJobResponse()


@pytest.mark.parametrize(
    "how", ["a signal, with a place", "a signal, without a place", "preempted", "drained"]
)
def test_a_standalone_process_drains_and_leaves_on_a_notice_or_signal(how: str) -> None:
    room, process_end = Room(2), Exited()
    context = Drained(room)
    ending = StandaloneExit(context, detect_s=0.0, exit_process=process_end)
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
    assert process_end.ran.wait(LIMIT_S)
    why = "SIGTERM to it" if how.startswith("a signal") else "as asked"
    assert context.left == (75, why)
    request = StopJobRequest(job="j", action=STOP_ACTION_DRAIN, worker_ids=["w0"], reason=why)
    assert context.requests == ([request] if update.HasField("place") else [])


def test_a_standalone_process_ignores_a_drain_of_another_member() -> None:
    room, process_end = Room(2), Exited()
    context = room.rank(0)
    ending = StandaloneExit(context, detect_s=0.0, exit_process=process_end)
    ending.arm()
    drain = StopNotice(generation=2, action=STOP_ACTION_DRAIN, worker_ids=["w7"], reason="w7 is to leave")
    for callback in list(room.observers[0]):
        callback(WorldUpdate(world=World(generation=2), phase=JOB_PHASE_RUNNING, notice=drain))
    assert process_end.ran.wait(LIMIT_S)
    assert context.left is not None
    assert "w7" not in context.left[1]


@pytest.mark.parametrize("how", ["closed", "done"])
def test_a_process_that_is_done_is_not_ended(how: str) -> None:
    room, process_end = Room(1), Exited()
    ending = StandaloneExit(room.rank(0), detect_s=0.0, exit_process=process_end)
    ending.arm()
    if how == "closed":
        ending.close()
    hear(room, 2, done=how == "done")
    assert not process_end.ran.wait(0.05)
    assert not room.observers[0] or how == "done"


def test_a_rank_waits_for_its_agent() -> None:
    AgentExit(Room(1).rank(0), grace_s=0.0).over(STALE)
    NeverEnds().over(STALE)


@pytest.mark.parametrize(
    ("error", "ends"),
    [(StaleIncarnation("the agent has ended"), True), (StaleGeneration("generation 2 runs"), False)],
)
def test_a_process_ends_with_its_agent_without_its_main_thread(error: StrataError, ends: bool) -> None:
    room, process_end = Room(1), Exited()
    forget = end_with_agent(room.rank(0), process_end)
    for callback in tuple(room.end_observers):
        callback(error)
    assert process_end.ran.wait(LIMIT_S if ends else 0.05) is ends
    forget()
    assert not room.end_observers


def test_a_training_that_is_over_outlives_its_agent() -> None:
    room = Room(1)
    for kind in (AgentExit, InProcessExit):
        ending = kind(room.rank(0))
        assert room.end_observers
        ending.close()
        assert not room.end_observers


def test_in_process_a_rank_waits_for_its_new_place() -> None:
    room = Room(1)
    context = room.rank(0)
    ending = InProcessExit(context)
    ending.check()
    assert not ending.wait_over(0.0)
    hear(room, 2)
    assert ending.wait_over(0.0)
    with pytest.raises(StaleGeneration, match="do not take this step"):
        ending.check()
    context.place(RankPlace(world=World(generation=2), local_rank=1))
    assert ending.wait_place().local_rank == 1
    ending.close()
    assert not room.observers[0]


def test_a_failure_caused_by_a_lost_peer_is_not_reported_as_the_rank_s_own() -> None:
    room, process_end = Room(2), Exited()
    ending = StandaloneExit(room.rank(0), detect_s=0.0, exit_process=process_end)
    waits = threading.Thread(
        target=ending.failed, args=(RuntimeError("connection closed by peer"),), daemon=True
    )
    waits.start()
    hear(room, 2)
    assert process_end.ran.wait(LIMIT_S)
    assert waits.is_alive(), "it waits for the end of its process"


@pytest.mark.parametrize("armed", [True, False])
def test_a_standalone_process_ends_with_75_once_the_control_plane_was_restored(
    armed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    room, process_end = Room(1), Exited()
    ending = StandaloneExit(room.rank(0), detect_s=0.0, exit_process=process_end)
    if armed:
        ending.arm()
    waits = threading.Thread(target=ending.failed, args=(RESTORED,), daemon=True)
    waits.start()
    for callback in tuple(room.end_observers):
        callback(RESTORED)
    assert process_end.ran.wait(LIMIT_S)
    assert waits.is_alive(), "it waits for the end of its process"
    assert "start the program again, it goes on from the newest checkpoint" in caplog.text


def test_a_process_refused_before_its_first_world_by_a_restore_ends_with_75() -> None:
    with pytest.raises(SystemExit) as raised, exit_if_refused():
        raise RESTORED
    assert raised.value.code == 75
    with pytest.raises(ClusterRestored), exit_if_refused(standalone=False):
        raise RESTORED


def test_a_process_that_is_done_is_not_ended_by_a_restore() -> None:
    room, process_end = Room(1), Exited()
    ending = StandaloneExit(room.rank(0), detect_s=0.0, exit_process=process_end)
    callbacks = tuple(room.end_observers)
    ending.close()
    assert not room.end_observers
    for callback in callbacks:
        callback(RESTORED)
    assert not process_end.ran.wait(0.05)


DONE = JobDone("job j is done: all 1 ranks are done")


class LiveReports(RoomRank):
    """A rank presumed lost whose session ends on its return, because its job is done."""

    def check(self) -> None:
        raise DONE


@pytest.mark.parametrize("error", [STALE, DONE, RuntimeError("connection closed by peer")])
def test_a_standalone_process_learns_that_its_job_was_done_without_it(error: Exception) -> None:
    room, process_end = Room(2), Exited()
    context = room.rank(0) if error is STALE else LiveReports(room, 0)
    ending = StandaloneExit(context, detect_s=LIMIT_S, exit_process=process_end)
    ending.arm()
    if error is STALE:
        hear(room, 2, done=True)
    with pytest.raises(JobDone, match="job j is done"):
        ending.over(STALE) if error is STALE else ending.failed(error)
    assert not process_end.count


@pytest.mark.parametrize("error", [RuntimeError("its own"), JobDone("job other is done")])
def test_a_rank_s_own_failure_counts_even_if_a_job_is_done(error: Exception) -> None:
    room = Room(1)
    context = room.rank(0) if isinstance(error, JobDone) else LiveReports(room, 0)
    StandaloneExit(context, detect_s=LIMIT_S, exit_process=Exited()).failed(error)


def test_a_failure_in_a_world_of_one_and_an_interruption_are_the_rank_s_own() -> None:
    process_end = Exited()
    StandaloneExit(Room(1).rank(0), detect_s=0.0, exit_process=process_end).failed(RuntimeError())
    StandaloneExit(Room(2).rank(0), detect_s=0.0, exit_process=process_end).failed(KeyboardInterrupt())
    assert not process_end.count
