"""A start must never silently run nothing: other commands, other runs, and newcomers to a job that has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from strata.core.ids import InstanceId, WorkerId
from strata.core.kv.records import Command, JobPhase, JobRun, Phase
from strata.core.members.membership import decide_rank_exit, decide_register
from strata.errors import Conflict, JobDone, JobFailed, Refused, StrataError
from tests.not_none import not_none
from tests.unit.core.rig import JOB, Observer, Store, carry_out, lead, leave, registration
from tests.unit.core.worlds.test_planning import commit, ends, head

TRAIN = Command(program="/home/ada/train.py", arguments="--epochs 3", digest="a")
LONGER = Command(program="/home/ada/train.py", arguments="--epochs 9", digest="b")
OTHER = Command(program="/home/ada/eval.py", arguments="--epochs 3", digest="a")
ENDED_MS = 1_764_079_320_000
"""The end of the job: 2025-11-25, 14:02 UTC."""


def come(
    store: Store, worker: str = "w0", command: Command | None = TRAIN, run_id: str = "r1", **more: Any
) -> None:
    """Register a fresh process of `worker`."""
    flags = {name: more.pop(name) for name in ("anew", "sole") if name in more}
    new = registration(worker, boot=f"boot-{worker}-{store.revision}", **more)
    new = dataclasses.replace(new, command=command, run_id=run_id, **flags)
    store.settle(lambda job: decide_register(job, new, served_by=InstanceId("i-r1")))


def trains(store: Store) -> int:
    """Form a job's world of one member; return the leader's epoch, as the functions below do."""
    epoch = lead(store)
    come(store)
    carry_out(store, epoch)
    return epoch


def unfinished(store: Store) -> int:
    """Let the only member of a job leave after step 20, so that its world forms again."""
    epoch = trains(store)
    commit(store, 20)
    leave(store, "w0")
    carry_out(store, epoch)
    return epoch


def done(store: Store) -> int:
    """Let a job of one member finish at 14:02, after 2,500 steps."""
    epoch = trains(store)
    commit(store, 2500)
    ends(store, 0, 0)
    carry_out(store, epoch)
    leave(store, "w0")
    phase = phase_of(store)
    assert phase.phase is Phase.DONE
    assert phase.ended_unix_ms > 0
    store.put(JOB.phase, dataclasses.replace(phase, ended_unix_ms=ENDED_MS))
    return epoch


def failed(store: Store) -> int:
    """Let a job of one member that has saved step 2,500 fail."""
    epoch = done(store)
    store.put(JOB.phase, JobPhase(phase=Phase.FAILED, reason="it broke", epoch=1))
    return epoch


def phase_of(store: Store) -> JobPhase:
    return not_none(store.live.view.record(JOB.phase, JobPhase))


# -- newcomers to each kind of job

FINISHED = "job job finished at 14:02 UTC on 2025-11-25 after 2,500 steps"
BOTH = f"{FINISHED}; it ran `{TRAIN.text}`, and this is `"
OWN_HINTS = ("give the job another name", "strata jobs delete job")


@pytest.mark.parametrize(
    ("job", "newcomer", "error", "says", "hints"),
    [
        # another command, while members are here
        (trains, {"command": LONGER}, Conflict, (TRAIN.text, LONGER.text), ("--job",)),
        (trains, {"command": OTHER}, Conflict, (TRAIN.text, OTHER.text), ("--job",)),
        (trains, {"command": OTHER, "anew": True}, Conflict, (TRAIN.text, OTHER.text), ("--job",)),
        (trains, {"command": OTHER, "resume": True}, Conflict, (TRAIN.text, OTHER.text), ("--job",)),
        (trains, {"command": OTHER, "worker": "w0"}, Conflict, (TRAIN.text, OTHER.text), ("--job",)),
        # another command in a job without members: waiting does not help, but a flag does
        (unfinished, {"command": OTHER}, Refused, (TRAIN.text, OTHER.text), ("--job", "--new", "--resume")),
        (unfinished, {"command": LONGER, "incarnation": 3}, Conflict, (LONGER.text,), ("--job",)),
        # a job that is done: the same run, or an unknown one
        (done, {"run_id": "r1"}, JobDone, (), ("--job",)),
        (done, {"command": None, "run_id": ""}, JobDone, (), OWN_HINTS),
        (done, {"resume": True, "incarnation": 9}, JobDone, (), ("--job",)),  # a reconnect resumes nothing
        # a job that is done: another run, or another command
        (done, {}, Refused, (FINISHED,), ("--new", "--job")),
        (done, {"command": None}, Refused, (FINISHED,), OWN_HINTS),
        (done, {"command": LONGER}, Refused, (f"{BOTH}{LONGER.text}`",), ("--new",)),
        (done, {"command": OTHER}, Refused, (f"{BOTH}{OTHER.text}`",), ("--new",)),
        (done, {"command": OTHER, "run_id": "r1"}, Refused, (f"{BOTH}{OTHER.text}`",), ("--new",)),
        # a job that failed
        (failed, {}, JobFailed, ("it broke",), ("--resume",)),
        (
            failed,
            {"command": None, "run_id": ""},
            JobFailed,
            ("it broke",),
            ("which forgets its checkpoints", "strata run --resume continues from step 2500"),
        ),
    ],
)
def test_a_refused_newcomer_receives_the_reason_and_a_hint(
    store: Store,
    job: Callable[[Store], int],
    newcomer: dict[str, Any],
    error: type[StrataError],
    says: tuple[str, ...],
    hints: tuple[str, ...],
) -> None:
    job(store)
    before = (store.live.run(), store.live.view.names(JOB.workers))
    with pytest.raises(error) as refused:
        come(store, **{"worker": "w1", "run_id": "r2", **newcomer})
    assert type(refused.value) is error
    assert [text for text in says if text not in refused.value.message] == []
    assert [text for text in hints if text not in refused.value.hint] == []
    if hints == OWN_HINTS:
        assert "--" not in refused.value.hint, "a program of its own has no options"
    assert (store.live.run(), store.live.view.names(JOB.workers)) == before


@pytest.mark.parametrize(
    ("job", "newcomer", "says", "restores"),
    [
        (unfinished, {"command": LONGER}, f"going on with `{LONGER.text}` by w0, after `{TRAIN.text}`", 20),
        (unfinished, {"command": LONGER, "anew": True}, "started over with", None),
        (unfinished, {"command": OTHER, "anew": True}, "started over with", None),
        (unfinished, {"command": OTHER, "resume": True}, "going on with", 20),
        (done, {"command": OTHER, "anew": True}, "started over by w0", None),
        (done, {"command": OTHER, "resume": True}, "resumed by w0", 2500),
        (done, {"command": OTHER, "attempt": 1}, "attempt 1 begun by w0", 2500),
    ],
)
def test_a_member_that_resumes_a_job_sets_its_run_and_command(
    store: Store, job: Callable[[Store], int], newcomer: dict[str, Any], says: str, restores: int | None
) -> None:
    epoch = job(store)
    come(store, run_id="r2", **newcomer)
    assert store.live.run() == JobRun(run_id="r2", command=newcomer["command"])
    assert phase_of(store).phase is Phase.RUNNING
    assert says in phase_of(store).reason
    carry_out(store, epoch)
    restore = head(store).restore
    assert (restore.step if restore is not None else None, head(store).no_progress) == (restores, 0)
    assert store.problems() == []


# -- commands


def test_the_first_member_sets_the_command_and_later_members_run_the_same(store: Store) -> None:
    come(store, "w0")
    come(store, "w1", run_id="by hand")
    assert store.live.run() == JobRun(run_id="r1", command=TRAIN)
    assert store.live.view.names(JOB.workers) == ["w0", "w1"]


def test_new_continues_an_unfinished_job_of_the_same_command(store: Store) -> None:
    epoch = unfinished(store)
    come(store, "w0", anew=True)
    carry_out(store, epoch)
    assert head(store).restore is not None, "a scheduler that requeues `--new` loses nothing"


def test_members_without_a_command_are_not_compared(store: Store) -> None:
    come(store, "w0")
    come(store, "w1", None, run_id="")
    leave(store, "w0")
    leave(store, "w1")
    come(store, "w2", None, run_id="")
    assert store.live.run().command == TRAIN, "what it ran is remembered"


@pytest.mark.parametrize(("first", "second"), [(LONGER, TRAIN), (TRAIN, LONGER), (LONGER, OTHER)])
def test_of_two_commands_that_come_at_once_one_has_the_job(
    store: Store, first: Command, second: Command
) -> None:
    """Both commands decided on the job without members; the later command decides again and is refused."""
    come(store)
    leave(store, "w0")
    late = Observer(store)
    other = dataclasses.replace(registration("w2"), command=second, run_id="r2", anew=True)
    txn = decide_register(late.job, other, served_by=InstanceId("i-r1")).txn
    come(store, "w1", first, anew=True)
    assert not store.execute(not_none(txn)).succeeded
    late.catch_up()
    assert isinstance(decide_register(late.job, other, served_by=InstanceId("i-r1")).refusal, Conflict)


def test_a_job_that_was_named_from_its_script_has_one_member(store: Store) -> None:
    come(store, "w0", sole=True)
    for worker in ("w0", "w1"):
        with pytest.raises(Conflict) as refused:
            come(store, worker, run_id="r2", sole=True)
        assert "host-w0" in refused.value.message
        assert "--job" in refused.value.hint
    assert store.live.view.names(JOB.workers) == ["w0"]
    leave(store, "w0")
    come(store, "w1", run_id="r2", sole=True)
    come(store, "w2", run_id="r3")  # this run named the job
    assert store.live.view.names(JOB.workers) == ["w1", "w2"]


def test_one_of_two_concurrent_sole_members_gets_the_job(store: Store) -> None:
    late = Observer(store)
    other = dataclasses.replace(registration("w2"), command=TRAIN, run_id="r2", sole=True)
    txn = decide_register(late.job, other, served_by=InstanceId("i-r1")).txn
    come(store, "w1", sole=True)
    come(store, "w3", None, run_id="")
    assert not store.execute(not_none(txn)).succeeded
    late.catch_up()
    assert isinstance(decide_register(late.job, other, served_by=InstanceId("i-r1")).refusal, Conflict)


# -- runs, and a job that is done


def test_a_member_without_a_run_id_keeps_the_jobs_run(store: Store) -> None:
    come(store, "w0", None, run_id="")
    come(store, "w1", run_id="r1")
    assert store.live.run() == JobRun(run_id="r1", command=TRAIN), "the first one said neither"
    come(store, "w2", run_id="r2")
    for worker in ("w0", "w1", "w2"):
        leave(store, worker)
    come(store, "w3", None, run_id="")
    assert store.live.run() == JobRun(run_id="r1", command=TRAIN)


def test_a_late_member_of_a_done_run_is_refused_although_the_first_member_named_no_run(
    store: Store, epoch: int
) -> None:
    come(store, "w0", None, run_id="")
    come(store, "w1", run_id="r1")
    leave(store, "w1")
    carry_out(store, epoch)
    ends(store, 0, 0)
    carry_out(store, epoch)
    assert store.live.phase() is Phase.DONE
    with pytest.raises(JobDone):
        come(store, "w2", run_id="r1")


def test_a_job_continued_by_another_run_belongs_to_that_run(store: Store, epoch: int) -> None:
    come(store, "w0", run_id="r1")
    leave(store, "w0")
    come(store, "w0", run_id="r2")
    carry_out(store, epoch)
    ends(store, 0, 0)
    carry_out(store, epoch)
    leave(store, "w0")
    with pytest.raises(JobDone):
        come(store, "w1", run_id="r2")
    with pytest.raises(Refused, match="finished at"):
        come(store, "w1", run_id="r1")


# -- failures before a step


def fail(store: Store, epoch: int, *, early: bool = True, code: int = 1) -> str:
    """Let rank 0 fail; return the reason of the leader's plan."""
    world = not_none(store.live.world())
    member = world.member_of(0)
    why = "exited with 1: ModuleNotFoundError: No module named 'trch'"
    store.settle(
        lambda job: decide_rank_exit(
            job, member.worker, member.incarnation, world.head.generation, 0, code, why, early=early
        )
    )
    return carry_out(store, epoch)


def test_a_program_that_fails_at_once_is_tried_twice_and_then_started_again_by_the_next_run(
    store: Store,
) -> None:
    epoch = trains(store)
    fail(store, epoch)
    fail(store, epoch)
    phase = phase_of(store)
    assert (phase.phase, phase.early) == (Phase.FAILED, True)
    assert "No module named 'trch'" in phase.reason
    with pytest.raises(JobFailed):
        come(store, "w1", run_id="r1")  # a late node of that run
    leave(store, "w0")
    come(store, "w0", LONGER, run_id="r2", min_workers=1, max_workers=3)
    assert (store.live.phase(), not_none(store.live.spec()).record.max_workers) == (Phase.RUNNING, 3)
    carry_out(store, epoch, settled=True)
    assert (head(store).generation, head(store).failures, head(store).began) == (3, 0, False)
    assert store.problems() == []


@pytest.mark.parametrize(
    ("limit", "failures"),
    [(1, "e"), (2, "ee"), (3, "ee"), (5, "eeeee"), (3, "ele"), (3, "lll")],
    ids=str,
)
def test_a_job_is_retried_up_to_its_limit_for_early_or_late_failures(
    store: Store, epoch: int, limit: int, failures: str
) -> None:
    """If the last generation failed early and the job has no checkpoint, the next run starts the job again."""
    come(store, max_no_progress_generations=limit)
    carry_out(store, epoch)
    for tried, how in enumerate(failures, 1):
        assert (store.live.phase(), head(store).generation) == (Phase.RUNNING, tried)
        fail(store, epoch, early=how == "e")
    early = failures[-1] == "e"
    assert (phase_of(store).phase, phase_of(store).early) == (Phase.FAILED, early)
    leave(store, "w0")
    with nullcontext() if early else pytest.raises(JobFailed):
        come(store, "w0", run_id="r2")


@pytest.mark.parametrize("saved", [False, True])
def test_a_rank_exit_with_78_fails_the_job_until_the_next_run(store: Store, saved: bool) -> None:
    """That run needs no `--resume`: the user has presumably fixed the program."""
    epoch = unfinished(store) if saved else trains(store)
    if saved:
        come(store, "w0", run_id="r1", resume=True)
        carry_out(store, epoch)
    began = head(store).generation
    fail(store, epoch, early=False, code=78)
    phase = phase_of(store)
    assert (phase.phase, phase.early, head(store).generation) == (Phase.FAILED, True, began)
    assert phase.reason.startswith("mend this, and run the command again: rank 0 of w0 failed (")
    with pytest.raises(JobFailed):
        come(store, "w1", run_id="r1")
    leave(store, "w0")
    come(store, "w0", run_id="r2")
    carry_out(store, epoch)
    assert (store.live.phase(), head(store).generation) == (Phase.RUNNING, began + 1)
    assert (head(store).restore is not None) == saved
    assert store.problems() == []


@pytest.mark.parametrize("on_all", [False, True])
def test_a_newcomers_exit_with_78_does_not_fail_the_job(store: Store, epoch: int, on_all: bool) -> None:
    """The job does not fail even if all ranks exit with 78, as they do after they compared their settings."""
    come(store, min_workers=1, max_workers=2)
    carry_out(store, epoch, settled=True)
    come(store, "w1")
    carry_out(store, epoch, settled=True)
    world = not_none(store.live.world())
    (newcomer,) = [member for member in world.members if member.worker == "w1"]
    for member in world.members if on_all else [newcomer]:
        store.settle(
            lambda job, member=member: decide_rank_exit(  # type: ignore[misc]  # it is bound now
                job,
                WorkerId(member.worker),
                member.incarnation,
                world.head.generation,
                member.first_rank,
                78,
                "its disk",
            )
        )
    carry_out(store, epoch)
    assert store.live.phase() is Phase.RUNNING
    assert [member.worker for member in not_none(store.live.world()).members] == ["w0"]


def test_a_job_that_grew_before_its_first_step_needs_no_flag_after_a_repair(store: Store, epoch: int) -> None:
    come(store, min_workers=1, max_workers=2)
    carry_out(store, epoch, settled=True)
    come(store, "w1")
    carry_out(store, epoch, settled=True)
    assert (head(store).generation, head(store).began) == (2, True)
    for _ in range(3):
        fail(store, epoch)
    assert (phase_of(store).phase, phase_of(store).early) == (Phase.FAILED, True)
    for worker in ("w0", "w1"):
        leave(store, worker)
    come(store, "w0", LONGER, run_id="r2")
    assert store.live.phase() is Phase.RUNNING


def test_a_job_with_a_checkpoint_survives_repeated_early_failures(store: Store) -> None:
    epoch = unfinished(store)
    come(store, "w0", LONGER)
    carry_out(store, epoch)
    fail(store, epoch)
    fail(store, epoch)
    assert store.live.phase() is Phase.RUNNING


def test_the_loss_of_a_member_is_no_failure_of_the_program(store: Store, epoch: int) -> None:
    """The remaining ranks also fail early, because they lost their peer."""
    for worker in ("w0", "w1"):
        come(store, worker, min_workers=2, max_workers=2)
    carry_out(store, epoch)
    leave(store, "w1")
    fail(store, epoch)
    assert head(store).began
    come(store, "w1")
    carry_out(store, epoch)
    fail(store, epoch)
    assert store.live.phase() is Phase.RUNNING
