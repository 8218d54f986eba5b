from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from strata.core.ids import BootId, InstanceId, WorkerId
from strata.core.job_requests import decide_resume
from strata.core.kv.records import Command, JobPhase, JobSpec, Phase
from strata.core.kv.txn import Decision
from strata.core.members.membership import (
    decide_leave,
    decide_register,
    decide_remove,
)
from strata.core.members.registration import (
    MAX_COMMAND_CHARS,
    MAX_RUN_ID_CHARS,
    MAX_SLOTS,
    MAX_WORKERS,
    Registration,
)
from strata.errors import (
    Conflict,
    InvalidArgument,
    JobDone,
    Refused,
    StaleIncarnation,
    StrataError,
)
from strata.session.terms import is_final
from tests.not_none import not_none
from tests.unit.core.rig import JOB, KEYS, Observer, Store, registration

R1, R2 = InstanceId("i-r1"), InstanceId("i-r2")


def enter(store: Store, who: Registration, *, served_by: InstanceId = R1, failed: int = 0) -> Decision:
    return store.settle(lambda job: decide_register(job, who, served_by=served_by, failed_incarnation=failed))


def incarnation(store: Store, worker: str = "w1") -> int:
    return not_none(store.job().worker(worker)).create_revision


def test_the_first_member_creates_the_job_with_its_spec(store: Store) -> None:
    decision = decide_register(store.job(), registration("w1", max_workers=3), served_by=R1)
    assert "creates job job" in decision.reason
    enter(store, registration("w1", max_workers=3, slots=MAX_SLOTS))
    spec = not_none(store.job().spec())
    assert spec.record == JobSpec(max_workers=3)
    held = not_none(store.job().worker("w1"))
    assert (held.record.boot, held.record.served_by) == ("boot-w1", R1)
    assert held.create_revision == spec.create_revision, "one transaction"


def test_the_first_member_of_the_job_and_of_an_attempt_bring_its_limits(store: Store) -> None:
    found = []
    for most, attempt in ((3, 0), (4, 0), (5, 1), (6, 1)):
        new = registration(f"w{most}", max_workers=most, attempt=attempt)
        ignored = "ignored" in decide_register(store.job(), new, served_by=R1).reason
        enter(store, new)
        found.append((not_none(store.job().spec()).record.max_workers, ignored))
    assert found == [(3, False), (3, True), (5, False), (5, True)]


def test_a_new_job_beyond_the_limit_is_refused_and_existing_jobs_take_members(store: Store) -> None:
    for name in ("a", "b"):
        store.put(KEYS.job(name).spec, JobSpec())

    refused = decide_register(store.job(), registration("w1"), served_by=R1, max_jobs=2)

    assert isinstance(refused.refusal, Refused)
    assert is_final(refused.refusal, welcomed=False), "nobody waits for room: nothing makes any"
    assert "the cluster has 2 jobs" in refused.reason
    assert "coordinator.max_jobs" in refused.refusal.hint
    assert refused.txn is None
    enter(store, registration("w1"))
    later = decide_register(store.job(), registration("w2"), served_by=R1, max_jobs=2)
    assert later.txn is not None, "a job that exists takes members, however many jobs there are"


def test_two_first_members_create_one_job(store: Store) -> None:
    view = store.job()
    txns = [
        not_none(decide_register(view, registration(name, max_workers=most), served_by=R1).txn)
        for name, most in (("w1", 3), ("w2", 5))
    ]
    assert [store.execute(txn).succeeded for txn in txns] == [True, False]
    enter(store, registration("w2", max_workers=5))
    assert not_none(store.job().spec()).record.max_workers == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"worker": ""},
        {"worker": "a/b"},
        {"boot": ""},
        {"boot": BootId("no good")},
        {"command": Command(program="x" * (MAX_COMMAND_CHARS + 1))},
        {"run_id": "x" * (MAX_RUN_ID_CHARS + 1)},
        {"attempt": -1},
        {"slots": 0},
        {"slots": MAX_SLOTS + 1},
        {"spec": JobSpec(min_workers=0)},
        {"spec": JobSpec(min_workers=3, max_workers=2)},
        {"spec": JobSpec(max_workers=MAX_WORKERS + 1)},
        {"spec": JobSpec(settle_s=-1)},
        {"spec": JobSpec(settle_s=float("nan"))},
        {"spec": JobSpec(max_no_progress_generations=0)},
    ],
)
def test_a_malformed_registration_is_refused(changes: dict[str, object]) -> None:
    wrong = dataclasses.replace(registration("w1"), **changes)  # type: ignore[arg-type]  # a table
    with pytest.raises(InvalidArgument):
        enter(Store(), wrong)


def test_registering_again_changes_nothing(store: Store) -> None:
    enter(store, registration("w1"))
    before = store.revision
    enter(store, registration("w1"))
    assert store.revision == before


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.DONE])
def test_a_hand_over_keeps_the_incarnation_of_a_finished_job_too(store: Store, phase: Phase) -> None:
    enter(store, registration("w1"))
    born = incarnation(store)
    store.put(JOB.phase, JobPhase(phase=phase, reason=""))
    enter(store, registration("w1", incarnation=born), served_by=R2)
    held = not_none(store.job().worker("w1"))
    assert (held.create_revision, held.record.served_by) == (born, R2)
    assert held.mod_revision > born


def phase_of(store: Store) -> JobPhase:
    return not_none(store.job().view.record(JOB.phase, JobPhase))


BY_HAND = JobPhase(phase=Phase.PAUSED, reason="by hand", attempt=1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (JobPhase(phase=Phase.DONE, reason="over", attempt=1), "attempt 2 begun by w2"),
        (JobPhase(phase=Phase.FAILED, reason="over", attempt=1), "attempt 2 begun by w2"),
        (JobPhase(phase=Phase.RUNNING, reason="", attempt=1), "attempt 2 begun by w2"),
        (BY_HAND, "by hand"),
    ],
)
def test_a_newer_attempt_restarts_an_ended_job_and_is_recorded_during_a_pause(
    store: Store, before: JobPhase, after: str
) -> None:
    enter(store, registration("w1", attempt=1))
    store.put(JOB.phase, before)
    enter(store, registration("w2", attempt=2))
    paused = before.phase is Phase.PAUSED
    assert phase_of(store) == JobPhase(
        phase=Phase.PAUSED if paused else Phase.RUNNING, reason=after, attempt=2
    )
    enter(store, registration("w3", attempt=1))
    assert phase_of(store).attempt == 2


@pytest.mark.parametrize("ended", [Phase.DONE, Phase.FAILED])
@pytest.mark.parametrize(("attempt", "incarnation"), [(0, 0), (1, 0), (2, 7)])
def test_an_ended_job_refuses_its_own_attempt_and_returning_members(
    store: Store, ended: Phase, attempt: int, incarnation: int
) -> None:
    store.put(JOB.phase, JobPhase(phase=ended, reason="over", attempt=1))
    with pytest.raises(StrataError, match="over"):
        enter(store, registration("w2", attempt=attempt, incarnation=incarnation))


def test_an_attempt_begun_during_a_pause_cannot_restart_the_job_it_finished(store: Store) -> None:
    """w2 starts attempt 2 in the pause. If the job did not record it, its late member w3 would restart the done job."""
    enter(store, registration("w1", attempt=1))
    store.put(JOB.phase, BY_HAND)
    enter(store, registration("w2", attempt=2))
    store.settle(decide_resume)
    store.put(JOB.phase, JobPhase(phase=Phase.DONE, reason="over", attempt=phase_of(store).attempt))
    with pytest.raises(JobDone, match="over"):
        enter(store, registration("w3", attempt=2))


def test_a_registration_races_the_end_of_the_job(store: Store) -> None:
    enter(store, registration("w1", max_workers=2))
    decision = decide_register(store.job(), registration("w2"), served_by=R1)
    assert decision.txn is not None
    store.put(JOB.phase, JobPhase(phase=Phase.DONE, reason="all done"))
    assert not store.execute(decision.txn).succeeded


def test_another_boot_on_a_live_key_is_refused(store: Store) -> None:
    enter(store, registration("w1", boot="old"))
    with pytest.raises(Conflict, match="alive elsewhere") as refused:
        enter(store, registration("w1", boot="new"))
    assert "host-w1:7" in refused.value.message
    with pytest.raises(Conflict):
        enter(store, registration("w1", boot="new"), failed=incarnation(store) + 1)


def test_a_newcomer_supersedes_a_failed_one_in_two_transactions(store: Store) -> None:
    enter(store, registration("w1", boot="old"))
    born = incarnation(store)
    new = registration("w1", boot="new")
    deletes = decide_register(store.job(), new, served_by=R1, failed_incarnation=born)
    assert store.execute(not_none(deletes.txn)).succeeded
    assert store.job().worker("w1") is None
    enter(store, new, failed=born)
    assert incarnation(store) > born


def test_only_the_incarnation_that_failed_is_superseded(store: Store) -> None:
    """Between the delete and the create, a third process may come."""
    enter(store, registration("w1", boot="old"))
    born = incarnation(store)
    enter(store, registration("w1", boot="third"), failed=born)
    with pytest.raises(Conflict):
        enter(store, registration("w1", boot="new"), failed=born)


def test_a_hand_over_saves_a_member_from_being_superseded(store: Store) -> None:
    enter(store, registration("w1", boot="old"))
    born = incarnation(store)
    seen = Observer(store)
    enter(store, registration("w1", boot="old"), served_by=R2)
    new = registration("w1", boot="new")
    decision = decide_register(seen.job, new, served_by=R1, failed_incarnation=born)
    assert not store.execute(not_none(decision.txn)).succeeded


def test_a_replaced_process_never_takes_its_place_back(store: Store) -> None:
    enter(store, registration("w1", boot="old"))
    born = incarnation(store)
    enter(store, registration("w1", boot="new"), failed=born)
    back = registration("w1", boot="old", incarnation=born)
    for failed in (0, born, incarnation(store)):
        with pytest.raises(StaleIncarnation, match="replaced"):
            enter(store, back, failed=failed)


def test_a_deleted_key_without_a_successor_is_registered_again(store: Store) -> None:
    enter(store, registration("w1"))
    born = incarnation(store)
    store.delete(JOB.worker("w1"))
    enter(store, registration("w1", incarnation=born))
    assert incarnation(store) > born


def test_a_leave_deletes_only_the_members_own_incarnation(store: Store) -> None:
    enter(store, registration("w1"))
    born = incarnation(store)
    for leaver, here in ((born + 1, True), (born, False), (born, False)):
        store.settle(partial(decide_leave, worker=WorkerId("w1"), incarnation=leaver))
        assert (store.job().worker("w1") is not None) is here


def test_a_removal_spares_a_member_that_reconnected_elsewhere(store: Store) -> None:
    enter(store, registration("w1"))
    held = not_none(store.job().worker("w1"))

    def remove(store: Store, mod_revision: int) -> Decision:
        return store.settle(
            lambda job: decide_remove(
                job, WorkerId("w1"), mod_revision=mod_revision, reason="its stream broke"
            )
        )

    lagging = Observer(store)
    enter(store, registration("w1"), served_by=R2)
    assert "handed over" in remove(store, held.mod_revision).reason
    stale = decide_remove(
        lagging.job, WorkerId("w1"), mod_revision=held.mod_revision, reason="its stream broke"
    )
    assert "its stream broke" in stale.reason
    assert not store.execute(not_none(stale.txn)).succeeded
    remove(store, store.job().view.mod_revision(JOB.worker("w1")))
    assert store.job().worker("w1") is None


def test_a_leaving_member_takes_over_its_key_and_creates_no_new_one(store: Store) -> None:
    new = registration("w1")
    enter(store, new)
    taken = store.settle(lambda job: decide_register(job, new, served_by=R2, leaving=True))
    assert taken.refusal is None
    departed = incarnation(store)
    store.settle(lambda job: decide_leave(job, WorkerId("w1"), departed))
    late = decide_register(store.job(), new, served_by=R1, leaving=True)
    assert isinstance(late.refusal, Refused)
    assert "has left" in late.refusal.message
