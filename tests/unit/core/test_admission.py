"""A job's name never silently runs nothing: commands, runs, and who comes to a job that has ended."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from strata.core.ids import InstanceId
from strata.core.members import decide_rank_exit, decide_register
from strata.core.records import Command, JobPhase, JobRun, Phase
from strata.errors import Conflict, JobDone, JobFailed, Refused
from tests.not_none import not_none
from tests.unit.core.rig import JOB, Observer, Store, carry_out, lead, leave, registration
from tests.unit.core.test_worlds import commit, ends, head

TRAIN = Command(program="/home/ada/train.py", arguments="--epochs 3", digest="a")
LONGER = Command(program="/home/ada/train.py", arguments="--epochs 9", digest="b")
OTHER = Command(program="/home/ada/eval.py", arguments="--epochs 3", digest="a")
ENDED_MS = 1_764_079_320_000
"""2025-11-25, 14:02 UTC."""


def come(
    store: Store, worker: str = "w0", command: Command | None = TRAIN, run_id: str = "r1", **more: Any
) -> None:
    """Register a fresh process of `worker`."""
    flags = {name: more.pop(name) for name in ("anew", "sole") if name in more}
    new = registration(worker, boot=f"boot-{worker}-{store.revision}", **more)
    new = dataclasses.replace(new, command=command, run_id=run_id, **flags)
    store.settle(lambda job: decide_register(job, new, served_by=InstanceId("i-r1")))


def done(store: Store, *, step: int = 2500) -> None:
    """Let a job of one member finish at 14:02, after so many steps."""
    epoch = lead(store)
    come(store)
    carry_out(store, epoch)
    commit(store, step)
    ends(store, 0, 0)
    carry_out(store, epoch)
    leave(store, "w0")
    phase = not_none(store.live.view.record(JOB.phase, JobPhase))
    assert phase.phase is Phase.DONE
    assert phase.ended_unix_ms > 0
    store.put(JOB.phase, dataclasses.replace(phase, ended_unix_ms=ENDED_MS))


def unfinished(store: Store) -> int:
    """Let a job of one member end at step 20, its world forming anew; return the leader's epoch."""
    epoch = lead(store)
    come(store)
    carry_out(store, epoch)
    commit(store, 20)
    leave(store, "w0")
    carry_out(store, epoch)
    return epoch


# -- commands


def test_the_first_member_says_what_the_job_runs_and_the_others_run_the_same(store: Store) -> None:
    come(store, "w0")
    come(store, "w1", run_id="by hand")
    assert store.live.run() == JobRun(run_id="r1", command=TRAIN)
    assert store.live.view.names(JOB.workers) == ["w0", "w1"]


@pytest.mark.parametrize("other", [LONGER, OTHER], ids=["arguments", "program"])
@pytest.mark.parametrize("flag", [{}, {"anew": True}, {"resume": True}])
def test_another_command_is_refused_while_members_are_there(
    store: Store, other: Command, flag: dict[str, Any]
) -> None:
    come(store, "w0")
    with pytest.raises(Conflict) as refused:
        come(store, "w1", other, **flag)
    assert TRAIN.text in refused.value.message
    assert other.text in refused.value.message
    assert "--job" in refused.value.hint
    assert store.live.run().command == TRAIN


def test_the_same_name_with_another_command_names_both_too(store: Store) -> None:
    come(store, "w0")
    with pytest.raises(Conflict, match=re.escape(OTHER.text)) as refused:
        come(store, "w0", OTHER)
    assert TRAIN.text in refused.value.message


def test_members_that_say_no_command_are_not_compared(store: Store) -> None:
    come(store, "w0")
    come(store, "w1", None, run_id="")
    leave(store, "w0")
    leave(store, "w1")
    come(store, "w2", None, run_id="")
    assert store.live.run().command == TRAIN, "what it ran is remembered"


def test_an_unfinished_job_without_members_goes_on_with_other_arguments(store: Store) -> None:
    epoch = unfinished(store)
    come(store, "w0", LONGER, run_id="r2")
    assert store.live.run() == JobRun(run_id="r2", command=LONGER)
    phase = not_none(store.live.view.record(JOB.phase, JobPhase))
    assert phase.phase is Phase.RUNNING
    assert all(one.text in phase.reason for one in (LONGER, TRAIN))
    carry_out(store, epoch)
    assert (not_none(head(store).restore).step, head(store).fruitless) == (20, 0)
    assert store.problems() == []


def test_another_program_does_not_take_an_unfinished_job_unasked(store: Store, epoch: int) -> None:
    come(store)
    carry_out(store, epoch)
    commit(store, 20)
    leave(store, "w0")
    with pytest.raises(Refused) as refused:
        come(store, "w0", OTHER)
    assert not isinstance(refused.value, Conflict), "nobody's end would change it"
    for word in (TRAIN.text, OTHER.text):
        assert word in refused.value.message
    for word in ("--job", "--new", "--resume"):
        assert word in refused.value.hint
    assert store.live.view.names(JOB.workers) == []


@pytest.mark.parametrize("other", [LONGER, OTHER], ids=["arguments", "program"])
def test_new_begins_an_unfinished_job_anew_with_another_command(store: Store, other: Command) -> None:
    epoch = unfinished(store)
    come(store, "w0", other, run_id="r2", anew=True)
    assert store.live.latest() is None
    carry_out(store, epoch)
    assert head(store).restore is None
    assert store.live.run().command == other
    assert store.problems() == []


def test_new_goes_on_with_an_unfinished_job_of_the_same_command(store: Store) -> None:
    epoch = unfinished(store)
    come(store, "w0", anew=True)
    carry_out(store, epoch)
    assert head(store).restore is not None, "a scheduler that requeues `--new` loses nothing"


def test_resume_takes_an_unfinished_job_with_another_program(store: Store) -> None:
    epoch = unfinished(store)
    come(store, "w0", OTHER, resume=True)
    carry_out(store, epoch)
    assert head(store).restore is not None
    assert store.live.run().command == OTHER


@pytest.mark.parametrize(("first", "second"), [(LONGER, TRAIN), (TRAIN, LONGER), (LONGER, OTHER)])
def test_of_two_commands_that_come_at_once_one_has_the_job(
    store: Store, first: Command, second: Command
) -> None:
    """Both saw the job without members; the one that is later decides again, and is refused."""
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
    come(store, "w2", run_id="r3")  # it named the job
    assert store.live.view.names(JOB.workers) == ["w1", "w2"]


def test_of_two_that_must_be_alone_and_come_at_once_one_has_the_job(store: Store) -> None:
    late = Observer(store)
    other = dataclasses.replace(registration("w2"), command=TRAIN, run_id="r2", sole=True)
    txn = decide_register(late.job, other, served_by=InstanceId("i-r1")).txn
    come(store, "w1", sole=True)
    come(store, "w3", None, run_id="")
    assert not store.execute(not_none(txn)).succeeded
    late.catch_up()
    assert isinstance(decide_register(late.job, other, served_by=InstanceId("i-r1")).refusal, Conflict)


def test_a_reconnect_changes_no_command(store: Store) -> None:
    come(store)
    leave(store, "w0")
    with pytest.raises(Conflict):
        come(store, "w0", LONGER, incarnation=3)


# -- runs, and a job that is done


def test_who_names_no_run_takes_none_away(store: Store) -> None:
    come(store, "w0", None, run_id="")
    come(store, "w1", run_id="r1")
    assert store.live.run() == JobRun(run_id="r1", command=TRAIN), "the first one said neither"
    come(store, "w2", run_id="r2")
    for worker in ("w0", "w1", "w2"):
        leave(store, worker)
    come(store, "w3", None, run_id="")
    assert store.live.run() == JobRun(run_id="r1", command=TRAIN)


def test_a_member_of_the_run_is_late_though_the_first_one_named_none(store: Store, epoch: int) -> None:
    come(store, "w0", None, run_id="")
    come(store, "w1", run_id="r1")
    leave(store, "w1")
    carry_out(store, epoch)
    ends(store, 0, 0)
    carry_out(store, epoch)
    assert store.live.phase() is Phase.DONE
    with pytest.raises(JobDone):
        come(store, "w2", run_id="r1")


def test_a_late_member_of_the_same_run_finds_nothing_left_to_do(store: Store) -> None:
    done(store)
    with pytest.raises(JobDone):
        come(store, "w1", run_id="r1")


def test_who_has_no_identity_is_taken_for_a_late_member(store: Store) -> None:
    done(store)
    with pytest.raises(JobDone):
        come(store, "w1", None, run_id="")


def test_another_run_is_told_when_the_job_finished_and_what_to_do(store: Store) -> None:
    done(store)
    with pytest.raises(Refused) as refused:
        come(store, "w1", run_id="r2")
    assert not isinstance(refused.value, JobDone)
    assert refused.value.message == "job job finished at 14:02 UTC on 2025-11-25 after 2,500 steps"
    assert "--new" in refused.value.hint
    assert "--job" in refused.value.hint


def test_who_has_no_command_line_is_told_of_no_flags(store: Store) -> None:
    done(store)
    with pytest.raises(Refused) as refused:
        come(store, "w1", None, run_id="r2")
    late = refused.value
    with pytest.raises(JobDone) as refused:
        come(store, "w1", None, run_id="")
    for hint in (late.hint, refused.value.hint):
        assert "--" not in hint
        assert "give the job another name" in hint
        assert "strata jobs delete job" in hint


def test_who_has_no_command_line_is_told_of_what_a_failed_job_has_saved(store: Store) -> None:
    done(store, step=2500)
    store.put(JOB.phase, JobPhase(phase=Phase.FAILED, reason="it broke", epoch=1))
    with pytest.raises(JobFailed, match="it broke") as refused:
        come(store, "w1", None, run_id="")
    assert "which forgets its checkpoints" in refused.value.hint
    assert "step 2500 is there to go on from by strata run --resume" in refused.value.hint


@pytest.mark.parametrize("run_id", ["r1", "r2"])
@pytest.mark.parametrize("other", [LONGER, OTHER], ids=["arguments", "program"])
def test_another_command_for_a_job_that_is_done_names_both(store: Store, run_id: str, other: Command) -> None:
    done(store)
    with pytest.raises(Refused) as refused:
        come(store, "w1", other, run_id=run_id)
    assert refused.value.message == (
        "job job finished at 14:02 UTC on 2025-11-25 after 2,500 steps;"
        f" it ran `{TRAIN.text}`, and this is `{other.text}`"
    )


def test_another_command_of_the_same_run_is_not_told_that_all_is_well(store: Store) -> None:
    done(store)
    with pytest.raises(Refused) as refused:
        come(store, "w1", OTHER, run_id="r1")
    assert not isinstance(refused.value, JobDone)
    assert TRAIN.text in refused.value.message
    assert OTHER.text in refused.value.message


@pytest.mark.parametrize("flag", [{"anew": True}, {"resume": True}, {"attempt": 1}])
def test_who_takes_a_finished_job_up_brings_run_and_command(store: Store, flag: dict[str, Any]) -> None:
    done(store)
    come(store, "w1", OTHER, run_id="r2", **flag)
    assert store.live.run() == JobRun(run_id="r2", command=OTHER)
    assert store.live.phase() is Phase.RUNNING


def test_a_job_that_goes_on_in_another_run_belongs_to_that_one(store: Store, epoch: int) -> None:
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
    """Let rank 0 fail, and return what the leader does then."""
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
    epoch: int,
) -> None:
    come(store, run_id="r1")
    carry_out(store, epoch)
    fail(store, epoch)
    assert head(store).generation == 2, "one retry"
    fail(store, epoch)
    phase = not_none(store.live.view.record(JOB.phase, JobPhase))
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


def test_a_job_that_may_have_made_a_step_is_tried_as_often_as_ever(store: Store, epoch: int) -> None:
    come(store)
    carry_out(store, epoch)
    for generation, early in ((2, True), (3, False)):
        fail(store, epoch, early=early)
        assert head(store).generation == generation
    assert head(store).began
    fail(store, epoch)
    phase = not_none(store.live.view.record(JOB.phase, JobPhase))
    assert (phase.phase, phase.early) == (Phase.FAILED, True), (
        "the last one failed early, and nothing is saved"
    )
    leave(store, "w0")
    come(store, "w0", run_id="r2")
    assert store.live.phase() is Phase.RUNNING


def test_a_job_that_failed_later_than_at_once_is_not_started_again_unasked(store: Store, epoch: int) -> None:
    come(store)
    carry_out(store, epoch)
    for _ in range(3):
        fail(store, epoch, early=False)
    leave(store, "w0")
    with pytest.raises(JobFailed):
        come(store, "w0", run_id="r2")


def test_a_job_that_grew_before_its_first_step_needs_no_flag_after_a_repair(store: Store, epoch: int) -> None:
    come(store, min_workers=1, max_workers=2)
    carry_out(store, epoch, settled=True)
    come(store, "w1")
    carry_out(store, epoch, settled=True)
    assert (head(store).generation, head(store).began) == (2, True)
    for _ in range(3):
        fail(store, epoch)
    phase = not_none(store.live.view.record(JOB.phase, JobPhase))
    assert (phase.phase, phase.early) == (Phase.FAILED, True)
    for worker in ("w0", "w1"):
        leave(store, worker)
    come(store, "w0", LONGER, run_id="r2")
    assert store.live.phase() is Phase.RUNNING


@pytest.mark.parametrize(("limit", "tries"), [(1, 1), (2, 2), (3, 2), (5, 5)])
def test_a_limit_that_was_raised_holds_for_early_failures_too(
    store: Store, epoch: int, limit: int, tries: int
) -> None:
    come(store, max_fruitless_generations=limit)
    carry_out(store, epoch)
    for tried in range(1, tries + 1):
        assert store.live.phase() is Phase.RUNNING
        assert head(store).generation == tried
        fail(store, epoch)
    phase = not_none(store.live.view.record(JOB.phase, JobPhase))
    assert (phase.phase, phase.early) == (Phase.FAILED, True)


def test_a_job_with_a_checkpoint_is_tried_as_often_as_ever(store: Store) -> None:
    epoch = unfinished(store)
    come(store, "w0", LONGER)
    carry_out(store, epoch)
    fail(store, epoch)
    fail(store, epoch)
    assert store.live.phase() is Phase.RUNNING


def test_the_loss_of_a_member_is_no_failure_of_the_program(store: Store, epoch: int) -> None:
    """The ranks that lose their peer fail as well, in their first seconds."""
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
