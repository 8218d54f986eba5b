"""Every rule of every checker rejects a history that violates it, and accepts the good run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from strata_chaos.checkers import ALL
from strata_chaos.judgement.judge import Result, judge
from tests.unit.chaos.checkers import doctors_of_watches  # the import adds to DOCTORS
from tests.unit.chaos.checkers.doctoring import DOCTORS, RESTORED_DOCTORS, Doctor, breaks
from tests.unit.chaos.story import JOB, ROOT, Line, Story, edit, good_run, number, worker


def is_event(line: Line, key: str) -> bool:
    return bool(line["op"] == "etcd.event" and line["result"]["key"] == JOB + key)


SLOT_20 = f"checkpoints/{number(20)}/{number(1)}"
OUTCOME_1 = f"barriers/all/{number(1)}/{number(1)}/outcome"
OUTCOME_2 = f"barriers/all/{number(1)}/{number(2)}/outcome"
FLOOR = f"barriers/all/{number(1)}/floor"


# -- leadership


@breaks("leadership/one-instance")
def overwritten(story: Story, _storage: Path) -> None:
    story.txn((f"{ROOT}leader", {"instance": "C"}))


@breaks("leadership/epochs-grow")
def an_epoch_comes_back(story: Story, _storage: Path) -> None:
    story.events("/leader")[2]["create_revision"] = 1


@breaks("leadership/fenced")
def a_deposed_leader_writes(story: Story, _storage: Path) -> None:
    story.txn((f"{JOB}standbys", {"workers": [], "epoch": 2}))


@breaks("leadership/fenced")
def a_head_without_any_leader(story: Story, _storage: Path) -> None:
    story.txn((f"{ROOT}leader", None))
    story.txn((f"{JOB}phase", {"phase": "done", "reason": "r", "epoch": 2}))


@breaks("leadership/leader-present")
def cleared_away_by_nobody(story: Story, _storage: Path) -> None:
    story.txn((f"{ROOT}leader", None))
    story.txn((f"{JOB}worlds/{number(2)}/restored", None))


@breaks("leadership/samples-agree")
def a_read_of_another_leader(story: Story, _storage: Path) -> None:
    story.lines("observer.sample")[-1]["result"]["epoch"] = 2


@breaks("leadership/known-keys")
def a_key_of_nobody(story: Story, _storage: Path) -> None:
    story.txn((f"{JOB}worldz", {"generation": 1}))


# -- registry


@breaks("registry/hand-over")
def another_boot_is_put(story: Story, _storage: Path) -> None:
    story.txn((f"{JOB}workers/w1", worker("b3", "B", 12)))


@breaks("registry/deleted-for-a-reason")
def a_living_member_is_removed(story: Story, _storage: Path) -> None:
    story.txn((f"{JOB}workers/w1", None))
    story.line("c.w1", 12, "member.alive", args={"worker": "w1"})


@breaks("registry/deleted-for-a-reason")
def a_living_member_is_removed_while_a_replica_is_frozen(story: Story, _storage: Path) -> None:
    faulty = {"fault": "freeze-leader", "targets": ["coordinator-1"]}
    story.line("nemesis", 6, "fault.inject", args=faulty, result={"effective": True, "evidence": ""})
    story.txn((f"{JOB}workers/w1", None))
    story.line("nemesis", 6, "fault.heal", args=faulty)
    story.line("c.w1", 12, "member.alive", args={"worker": "w1"})


@breaks("registry/deleted-for-a-reason")
def a_living_member_is_removed_while_another_is_frozen(story: Story, _storage: Path) -> None:
    faulty = {"fault": "freeze-member", "targets": ["member:99"]}
    story.line("nemesis", 6, "fault.inject", args=faulty, result={"effective": True, "evidence": ""})
    story.txn((f"{JOB}workers/w1", None))
    story.line("c.w1", 12, "member.alive", args={"worker": "w1"})


@breaks("registry/deleted-for-a-reason")
def a_living_member_is_removed_while_another_host_is_cut_off(story: Story, _storage: Path) -> None:
    for job, host in (("j", "host-1"), ("k", "host-2")):
        story.line("nemesis", 6, "job.placed", args={"job": job, "host": host})
    faulty = {"fault": "isolate-workers", "targets": ["host-2"]}
    story.line("nemesis", 6, "fault.inject", args=faulty, result={"effective": True, "evidence": ""})
    story.txn((f"{JOB}workers/w1", None))
    story.line("c.w1", 12, "member.alive", args={"worker": "w1"})


@breaks("registry/deleted-for-a-reason")
def a_living_agent_is_removed(story: Story, _storage: Path) -> None:
    story.txn((f"{JOB}workers/w2", worker("b9", "B", 77)))
    story.txn((f"{JOB}workers/w2", None))
    story.t += 20
    story.line("node", 5, "process.ended", args={"pid": 77, "worker": "w2", "code": 0})


@breaks("registry/stale-never-acts")
def a_dead_incarnation_acks(story: Story, _storage: Path) -> None:
    edit(story.events(f"{SLOT_20}/a2/acks/{number(1)}")[0], incarnation=99)


@breaks("registry/reported-incarnation")
def anothers_incarnation(story: Story, _storage: Path) -> None:
    story.lines("member.join")[-1]["result"]["incarnation"] = 4


# -- worlds


@breaks("worlds/one-by-one")
def a_generation_twice(story: Story, _storage: Path) -> None:
    edit(story.events("world")[1], generation=1)


@breaks("worlds/whole")
def a_member_is_missing(story: Story, _storage: Path) -> None:
    edit(story.events("world")[1], members=3)


@breaks("worlds/places")
def a_hole_among_the_ranks(story: Story, _storage: Path) -> None:
    _members(story, 2, lambda members: members[1].update(first_rank=2))


@breaks("worlds/places")
def a_worker_twice(story: Story, _storage: Path) -> None:
    _members(story, 1, lambda members: members[1].update(worker="w0"))


@breaks("worlds/members-existed")
def a_member_that_never_was(story: Story, _storage: Path) -> None:
    _members(story, 2, lambda members: members[1].update(incarnation=999))


@breaks("worlds/survivors-stay")
def survivors_swap(story: Story, _storage: Path) -> None:
    def swap(members: list[Line]) -> None:
        for member, other in zip(members, reversed([dict(m) for m in members]), strict=True):
            member.update(worker=other["worker"], incarnation=other["incarnation"])

    _members(story, 2, swap)


@breaks("worlds/restore-named")
def latest_is_not_moved_with_the_head(story: Story, _storage: Path) -> None:
    last = story.events("latest")[-1]
    story.drop(lambda line: line["result"] is last)


@breaks("worlds/chunks-stay")
def a_chunk_changes_later(story: Story, _storage: Path) -> None:
    chunk = _chunk(story, 2)
    story.txn((chunk["key"], {"members": json.loads(chunk["value"])["members"]}))


@breaks("worlds/reported-places")
def a_rank_that_is_anothers(story: Story, _storage: Path) -> None:
    story.lines("member.rejoin")[0]["result"]["rank"] = 1


def _chunk(story: Story, generation: int) -> Line:
    """Return the event that wrote a generation's members."""
    folder = f"{JOB}worlds/{number(generation)}/"
    events = (line["result"] for line in story.lines("etcd.event"))
    return next(e for e in events if e["key"].startswith(folder) and "/members/" in e["key"])


def _members(story: Story, generation: int, change: Callable[[list[Line]], None]) -> None:
    chunk = _chunk(story, generation)
    members = json.loads(chunk["value"])["members"]
    change(members)
    edit(chunk, members=members)


# -- barriers


@breaks("barriers/once")
def released_and_then_broken(story: Story, _storage: Path) -> None:
    value = json.loads(story.events(OUTCOME_2)[0]["value"])
    story.txn((JOB + OUTCOME_2, {**value, "result": "broken", "payloads": {}}))


@breaks("barriers/once")
def a_second_outcome_after_the_first_was_cleared(story: Story, _storage: Path) -> None:
    value = json.loads(story.events(OUTCOME_1)[0]["value"])
    story.txn((JOB + OUTCOME_1, None))
    story.txn((JOB + OUTCOME_1, {**value, "result": "timed_out", "payloads": {}}))


@breaks("barriers/current")
def released_in_a_generation_that_has_ended(story: Story, _storage: Path) -> None:
    value = json.loads(story.events(OUTCOME_2)[0]["value"])
    late = f"{JOB}barriers/all/{number(1)}/"
    story.txn(
        (f"{late}{number(3)}/outcome", {**value, "round": 3, "payloads": {}}), (f"{late}floor", {"round": 3})
    )


@breaks("barriers/floor")
def released_without_its_floor(story: Story, _storage: Path) -> None:
    floor = story.events(FLOOR)[1]
    story.drop(lambda line: line["result"] is floor)


@breaks("barriers/floor")
def the_floor_falls(story: Story, _storage: Path) -> None:
    story.txn((JOB + FLOOR, {"round": 1}))


@breaks("barriers/well-formed")
def released_with_somebody_missing(story: Story, _storage: Path) -> None:
    edit(story.events(OUTCOME_2)[0], missing=[1])


@breaks("barriers/all-arrived")
def released_before_a_participant_came(story: Story, _storage: Path) -> None:
    late = [line for line in story.lines("barrier") if line.get("id") == "all-2-1"]
    for line in late:
        line["t0"] += 5
        line["t1"] = None if line["t1"] is None else line["t1"] + 5


@breaks("barriers/all-arrived")
def released_with_an_arrival_that_nobody_made(story: Story, _storage: Path) -> None:
    story.drop(lambda line: line.get("id") == "all-2-1")


@breaks("barriers/one-round")
def an_arrival_counts_twice(story: Story, _storage: Path) -> None:
    first = json.loads(story.events(OUTCOME_1)[0]["value"])
    edit(story.events(OUTCOME_2)[0], payloads=first["payloads"])


@breaks("barriers/release-matches-etcd")
def another_payload_is_delivered(story: Story, _storage: Path) -> None:
    ended = next(line for line in story.lines("barrier") if line["outcome"] == "ok")
    ended["result"]["payloads"]["1"] = "AAAA"


@breaks("barriers/release-matches-etcd")
def a_release_that_etcd_does_not_have(story: Story, _storage: Path) -> None:
    edit(story.events(OUTCOME_2)[0], result="timed_out", payloads={})


@breaks("barriers/outcome-matches-etcd")
def reported_timed_out_though_released(story: Story, _storage: Path) -> None:
    ended = next(line for line in story.lines("barrier") if line["outcome"] == "ok")
    ended.update(outcome="fail", result={}, error={"type": "BarrierTimeout", "message": "late"})


@breaks("barriers/participants")
def released_with_other_ranks(story: Story, _storage: Path) -> None:
    for line in story.lines("barrier"):
        line["args"]["ranks"] = [0, 1, 2]


# -- catalog


@breaks("catalog/transitions")
def a_commit_is_taken_back(story: Story, _storage: Path) -> None:
    value = json.loads(story.events(SLOT_20)[-1]["value"])
    story.txn((JOB + SLOT_20, {**value, "state": "open"}))


@breaks("catalog/transitions")
def a_committed_record_vanishes(story: Story, _storage: Path) -> None:
    story.txn((JOB + SLOT_20, None))


@breaks("catalog/transitions")
def another_attempt_takes_a_committed_slot(story: Story, _storage: Path) -> None:
    value = json.loads(story.events(SLOT_20)[-1]["value"])
    story.txn((JOB + SLOT_20, {**value, "state": "corrupt", "attempt": "a3"}))


@breaks("catalog/complete")
def committed_without_an_ack(story: Story, _storage: Path) -> None:
    story.drop(lambda line: is_event(line, f"{SLOT_20}/a2/acks/{number(1)}"))


@breaks("catalog/complete")
def committed_without_the_seal(story: Story, _storage: Path) -> None:
    story.drop(lambda line: is_event(line, f"{SLOT_20}/a2/acks/seal"))


@breaks("catalog/current")
def committed_after_its_generation(story: Story, _storage: Path) -> None:
    head = story.events("world")[0]
    edit(head, generation=3)


@breaks("catalog/acks-once")
def an_ack_again(story: Story, _storage: Path) -> None:
    ack = json.loads(story.events(f"{SLOT_20}/a2/acks/{number(1)}")[0]["value"])
    story.txn((f"{JOB}{SLOT_20}/a2/acks/{number(1)}", {**ack, "digest": "other"}))


@breaks("catalog/acks-once")
def an_ack_to_what_is_committed(story: Story, _storage: Path) -> None:
    story.txn((f"{JOB}{SLOT_20}/a2/acks/{number(2)}", {"digest": "d", "worker": "w1", "incarnation": 0}))


@breaks("catalog/latest-order")
def latest_goes_back(story: Story, _storage: Path) -> None:
    old = {"generation": 1, "step": 20, "attempt": "a2", "record_generation": 1}
    story.txn((f"{JOB}latest", old))


@breaks("catalog/latest-order")
def latest_names_nothing(story: Story, _storage: Path) -> None:
    edit(story.events("latest")[-1], attempt="a9")


@breaks("catalog/latest-kept")
def the_latest_is_tombstoned(story: Story, _storage: Path) -> None:
    value = json.loads(story.events(SLOT_20)[-1]["value"])
    story.txn((JOB + SLOT_20, {**value, "state": "deleting"}))


@breaks("catalog/committed-stays")
def reported_committed_and_never_was(story: Story, _storage: Path) -> None:
    ended = [line for line in story.lines("checkpoint.save") if line["outcome"] == "ok"]
    ended[0]["result"]["attempt"] = "a9"


@breaks("catalog/committed-stays")
def reported_committed_before_it_was(story: Story, _storage: Path) -> None:
    committed = story.events(SLOT_20)[1]["revision"]
    early = {"revision": committed - 1, "epoch": 2, "leader": None}
    place = next(
        i for i, line in enumerate(story.files["observer"]) if line["result"].get("revision") == committed
    )
    sample = {**story.lines("observer.sample")[0], "result": early}
    sample["t0"] = sample["t1"] = 9e9
    story.files["observer"].insert(place, sample)


@breaks("catalog/restore-exact")
def other_bytes_come_back(story: Story, _storage: Path) -> None:
    story.lines("checkpoint.restore")[1]["result"]["digest"] = "0" * 64


@breaks("catalog/restore-point")
def a_rank_begins_elsewhere(story: Story, _storage: Path) -> None:
    story.lines("checkpoint.restore")[1]["args"]["point"] = None


@breaks("catalog/latest-monotonic")
def a_reader_hears_of_an_older_one(story: Story, _storage: Path) -> None:
    first, second = story.lines("checkpoint.latest")
    first["result"], second["result"] = second["result"], first["result"]


@breaks("catalog/on-disk")
def a_flipped_bit(_story: Story, storage: Path) -> None:
    image = storage / "a2" / "rank-1.safetensors"
    image.write_bytes(image.read_bytes()[:-1] + b"?")


@breaks("catalog/on-disk")
def a_lost_image(_story: Story, storage: Path) -> None:
    (storage / "a2" / "rank-0.safetensors").unlink()


@breaks("catalog/on-disk")
def a_missing_marker(_story: Story, storage: Path) -> None:
    (storage / "a2" / "COMMIT").unlink()


# -- the tests


# -- samples


@breaks("samples/once")
def a_sample_in_two_steps(story: Story, _storage: Path) -> None:
    story.lines("training.step")[-1]["args"]["samples"] = [0]


@breaks("samples/once")
def two_ranks_take_one_sample(story: Story, _storage: Path) -> None:
    story.lines("training.step")[-1]["args"].update(rank=2)
    step = story.lines("training.step")[-1]
    story.line("c.w9", 19, "training.step", args={**step["args"], "rank": 1})


@breaks("samples/none-lost")
def a_step_is_left_out(story: Story, _storage: Path) -> None:
    story.drop(lambda line: line["op"] == "training.step" and line["args"]["step"] == 5)


RULES = [
    f"{checker.findings.checker}/{rule}"
    for checker in (make() for make in ALL)
    for rule in checker.findings.rules
]
CASES = [(rule, doctor) for rule, doctors in DOCTORS.items() for doctor in doctors]


def test_the_good_run_passes_and_exercises_every_rule(tmp_path: Path) -> None:
    verdict = judge(good_run(tmp_path / "storage").write(tmp_path))
    assert verdict.result is Result.PASS, verdict.summary()
    assert not [rule for rule in verdict.unjudged if not rule.startswith("restores/")]


@pytest.mark.parametrize(
    ("rule", "doctor"), CASES, ids=[f"{rule}:{doctor.__name__}" for rule, doctor in CASES]
)
def test_a_doctored_history_is_rejected_with_its_lines(rule: str, doctor: Doctor, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    story = good_run(storage)
    doctor(story, storage)
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.VIOLATION
    found = [v for v in verdict.violations if f"{v.checker}/{v.rule}" == rule]
    assert found, verdict.summary()
    assert all(v.message and v.evidence and all("{" in line for line in v.evidence) for v in found)


@pytest.mark.parametrize("targets", [["member:12"], ["host-1"]])
def test_a_member_that_a_fault_touched_may_be_removed(targets: list[str], tmp_path: Path) -> None:
    story = good_run(tmp_path / "storage")
    faulty = {"fault": "isolate-workers", "targets": targets}
    story.line("nemesis", 6, "fault.inject", args=faulty, result={"effective": True, "evidence": ""})
    story.line("nemesis", 6, "fault.heal", args=faulty)
    story.txn((f"{JOB}workers/w1", None))
    story.line("c.w1", 12, "member.alive", args={"worker": "w1"})
    assert judge(story.write(tmp_path)).result is Result.PASS


@pytest.mark.parametrize(("later_s", "result"), [(0.2, Result.PASS), (5.0, Result.VIOLATION)])
def test_an_abandoned_join_may_remove_its_key_for_a_short_time_only(
    later_s: float, result: Result, tmp_path: Path
) -> None:
    story = good_run(tmp_path / "storage")
    story.line("c.w1", 12, "member.join", args={"worker": "w1", "job": "j"}, outcome="unknown")
    story.t += later_s
    story.txn((f"{JOB}workers/w1", None))
    story.line("c.w1", 12, "member.alive", args={"worker": "w1"})
    assert judge(story.write(tmp_path)).result is result


@pytest.mark.parametrize(("begin_s", "held_s"), [(14, 1), (10, 6), (8, 0.4)])
def test_a_fault_may_keep_a_stream_silent(begin_s: float, held_s: float, tmp_path: Path) -> None:
    """Silence counts before the fault and from 10 s after it. Here neither part reaches the limit of 15 s."""
    story = good_run(tmp_path / "storage")
    doctors_of_watches.a_stream_falls_silent(story, tmp_path)
    doctors_of_watches.a_fault(story, story.t - begin_s, story.t - begin_s + held_s)
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.PASS, verdict.summary()


@pytest.mark.parametrize(("later_s", "result"), [(2.0, Result.PASS), (17.0, Result.VIOLATION)])
def test_the_silence_of_a_stream_counts_only_until_its_reader_dies(
    later_s: float, result: Result, tmp_path: Path
) -> None:
    story = good_run(tmp_path / "storage")
    last_t = story.lines("watch.message")[-1]["t0"]
    doctors_of_watches.a_stream_falls_silent(story, tmp_path)
    story.drop(lambda line: line["op"] == "watch" and line.get("id") == "watch-2" and line["t1"] is not None)
    story.line("fleet", 5, "process.ended", args={"pid": 30, "code": -9, "worker": ""}, t=last_t + later_s)
    story.line("nemesis", 6, "run.phase", args={"phase": "end"}, t=last_t + 60)
    verdict = judge(story.write(tmp_path))
    assert verdict.result is result, verdict.summary()


def test_a_stream_owes_no_messages_after_the_run(tmp_path: Path) -> None:
    story = good_run(tmp_path / "storage")
    last_t = story.lines("watch.message")[-1]["t0"]
    doctors_of_watches.a_stream_falls_silent(story, tmp_path)
    story.line("nemesis", 6, "run.phase", args={"phase": "end"}, t=last_t + 2)
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.PASS, verdict.summary()


def test_every_rule_has_a_doctored_history() -> None:
    assert sorted({*DOCTORS, *RESTORED_DOCTORS}) == sorted(RULES)
