"""Checkers on a run in which etcd was lost and restored: rules judged for each life of etcd, and rules of a restore."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata_chaos.judgement.judge import Result, judge
from tests.unit.chaos.checkers.doctoring import RESTORED_DOCTORS, Doctor, breaks
from tests.unit.chaos.story import JOB, ROOT, SLOT_20, Line, Story, edit, number, restored_run, worker


def of_life_2(story: Story, key: str) -> Line:
    """Return the first event of a key in etcd's second life, which begins with the restore."""
    for line in story.files["observer-2"]:
        if line["op"] == "etcd.event" and line["result"]["key"] == key:
            result: Line = line["result"]
            return result
    raise LookupError(key)


def again(story: Story) -> Line:
    """Return the event of the world that the restore wrote."""
    return of_life_2(story, f"{JOB}world")


def delivered(story: Story, uid: str) -> list[Line]:
    return [line for line in story.lines("member.join") if line["result"].get("uid") == uid]


# -- rules of a restore


@breaks("restores/committed-kept", restored=True)
def a_restore_that_adopts_nothing_newer_than_its_backup(story: Story, _storage: Path) -> None:
    story.drop(lambda line: line["op"] == "etcd.event" and _in_life_2(story, line) and _is_of_step_20(line))


@breaks("restores/committed-kept", restored=True)
def a_restored_commit_is_only_prepared(story: Story, _storage: Path) -> None:
    edit(of_life_2(story, SLOT_20), state="prepared")


@breaks("restores/committed-kept", restored=True)
def a_restored_commit_is_corrupt(story: Story, _storage: Path) -> None:
    edit(of_life_2(story, SLOT_20), state="corrupt")


@breaks("restores/committed-kept", restored=True)
def another_attempt_is_restored_in_its_place(story: Story, _storage: Path) -> None:
    edit(of_life_2(story, SLOT_20), attempt="a9")


@breaks("restores/generations-rise", restored=True)
def a_generation_that_falls(story: Story, _storage: Path) -> None:
    edit(again(story), generation=1)


@breaks("worlds/one-by-one", restored=True)
def a_generation_is_left_out_after_the_restore(story: Story, _storage: Path) -> None:
    edit(again(story), generation=2)


@breaks("restores/lineage", restored=True)
def another_lineage(story: Story, _storage: Path) -> None:
    edit(of_life_2(story, f"{ROOT}uid"), uid="v.1")


@breaks("restores/lineage", restored=True)
def the_old_uid(story: Story, _storage: Path) -> None:
    edit(of_life_2(story, f"{ROOT}uid"), uid="u")


@breaks("restores/alone", restored=True)
def a_member_is_registered_by_the_restore(story: Story, _storage: Path) -> None:
    _during(story, f"{JOB}workers/w7", worker("b7", "A", 70))


@breaks("restores/alone", restored=True)
def a_leader_while_the_restore_is_at_work(story: Story, _storage: Path) -> None:
    _during(story, f"{ROOT}leader", {"instance": "A"})


@breaks("restores/alone", restored=True)
def a_cluster_of_its_own_on_wiped_disks(story: Story, _storage: Path) -> None:
    """No operator restores etcd; instead a new replica founds a cluster."""
    story.lose()
    story.txn((f"{ROOT}uid", {"uid": "fresh"}))


@breaks("restores/restore-is-reported", restored=True)
def a_client_gets_another_cluster(story: Story, _storage: Path) -> None:
    args = {"worker": "w0", "job": "j", "after": 2}
    story.t += 1
    story.line("c.w0", 14, "member.rejoin", args=args, outcome="unknown", error="ClusterReplaced")


@breaks("samples/once", restored=True)
def a_sample_comes_again_after_the_restore(story: Story, _storage: Path) -> None:
    lines = [line for line in story.lines("training.step") if line["args"]["uid"] == "u.1"]
    lines[0]["args"]["samples"] = [2]


# -- rules that are judged for each life of etcd


@breaks("leadership/fenced", restored=True)
def the_epoch_of_the_life_before(story: Story, _storage: Path) -> None:
    epoch = story.events("/leader")[-2]["create_revision"]
    story.txn((f"{JOB}standbys", {"workers": [], "epoch": epoch + 100}))


@breaks("leadership/samples-agree", restored=True)
def a_read_of_another_leader(story: Story, _storage: Path) -> None:
    story.lines("observer.sample")[-1]["result"]["epoch"] = 1


@breaks("registry/reported-incarnation", restored=True)
def an_incarnation_of_the_life_before(story: Story, _storage: Path) -> None:
    delivered(story, "u.1")[0]["result"]["incarnation"] = 4


@breaks("worlds/reported-places", restored=True)
def a_place_in_a_world_of_the_life_before(story: Story, _storage: Path) -> None:
    delivered(story, "u.1")[0]["result"]["uid"] = "u"


@breaks("worlds/members-existed", restored=True)
def a_member_of_the_life_before(story: Story, _storage: Path) -> None:
    chunk = of_life_2(story, f"{JOB}worlds/{number(4)}/{number(4)}/members/{number(0)}")
    members = json.loads(chunk["value"])["members"]
    members[0]["incarnation"] = 4
    edit(chunk, members=members)


@breaks("catalog/restore-point", restored=True)
def the_world_begins_from_elsewhere(story: Story, _storage: Path) -> None:
    story.lines("checkpoint.restore")[-1]["args"]["point"] = None


@breaks("catalog/restore-exact", restored=True)
def other_bytes_after_the_restore(story: Story, _storage: Path) -> None:
    story.lines("checkpoint.restore")[-1]["result"]["digest"] = "0" * 64


@breaks("catalog/on-disk", restored=True)
def a_restored_checkpoint_is_not_readable(_story: Story, storage: Path) -> None:
    (storage / "a2" / "manifest.json").unlink()


@breaks("catalog/latest-monotonic", restored=True)
def latest_goes_back_by_the_restore(story: Story, _storage: Path) -> None:
    story.lines("checkpoint.latest")[-1]["result"].update(step=10)


@breaks("watches/never-back", restored=True)
def a_stream_goes_on_into_the_restored_cluster(story: Story, _storage: Path) -> None:
    messages = [line for line in story.lines("watch.message") if line["args"]["stream"] == 2]
    messages[-1]["result"]["uid"] = "u.1"


@breaks("watches/resync-state", restored=True)
def a_resync_of_the_restored_cluster_tells_of_the_life_before(story: Story, _storage: Path) -> None:
    args = {"job": "j", "prefix": "", "stream": 3, "resume": None, "uid": ""}
    story.line("watcher", 30, "watch", args=args, begun="watch-3")
    result = {"resync": True, "events": [["spec", 4, 4, "0" * 16]], "revision": 4, "uid": "u.1"}
    story.line("watcher", 30, "watch.message", args={"stream": 3}, result=result)


def _is_of_step_20(line: Line) -> bool:
    return str(line["result"]["key"]).startswith((SLOT_20, f"{JOB}latest"))


def _in_life_2(story: Story, line: Line) -> bool:
    return any(line is other for other in story.files["observer-2"])


def _during(story: Story, key: str, value: Line) -> None:
    """Write a key in the restore's own transaction."""
    event = dict(again(story))
    event |= {"key": key, "value": json.dumps({"v": 1, **value}), "prev": None}
    lines = story.files["observer-2"]
    (index,) = [n for n, line in enumerate(lines) if line["result"] is again(story)]
    lines.insert(index, {**lines[index], "result": event})


def _older_snapshot(story: Story) -> Line:
    """Restart etcd from a snapshot of the restored cluster, then release a barrier; return that outcome."""
    head = story.events("world")[-1]
    story.lose()
    story.revision = 100
    for key, value in ((f"{ROOT}uid", '{"v":1,"uid":"u.1"}'), (f"{JOB}world", head["value"])):
        result = {"revision": 9, "create_revision": 9, "key": key, "value": value, "lease": 0}
        story.line("observer", 1, "etcd.listed", args={"why": "snapshot"}, result=result)
    story.line("observer", 1, "observer.listed", args={"why": "snapshot"}, result={"revision": 100})
    outcome = {"generation": 4, "round": 1, "digest": "d", "reason": "r", "missing": []}
    outcome |= {"result": "released", "payloads": {"0": "c2xpcA=="}}
    base = f"{JOB}barriers/all/{number(4)}/"
    story.txn((f"{base}{number(1)}/outcome", outcome), (f"{base}floor", {"round": 1}))
    args = {"job": "j", "worker": "w0", "generation": 4, "rank": 0, "name": "all", "ranks": [0]}
    return {**args, "payload": "c2xpcA=="}


@breaks("barriers/release-matches-etcd", restored=True)
def a_release_in_an_older_snapshot_is_reported(story: Story, _storage: Path) -> None:
    args = _older_snapshot(story)
    story.line("c.w0", 14, "barrier", args=args, result={"payloads": {"0": "c2xpcA=="}})


CASES = [(rule, doctor) for rule, doctors in RESTORED_DOCTORS.items() for doctor in doctors]


def test_a_restored_run_is_accepted(tmp_path: Path) -> None:
    verdict = judge(restored_run(tmp_path / "storage").write(tmp_path))
    assert verdict.result is Result.PASS, verdict.summary()
    assert verdict.unjudged == ()


@pytest.mark.parametrize(
    ("rule", "doctor"), CASES, ids=[f"{rule}:{doctor.__name__}" for rule, doctor in CASES]
)
def test_a_doctored_restore_is_rejected_with_its_lines(rule: str, doctor: Doctor, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    story = restored_run(storage)
    doctor(story, storage)
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.VIOLATION, verdict.summary()
    found = [v for v in verdict.violations if f"{v.checker}/{v.rule}" == rule]
    assert found, verdict.summary()
    assert all(v.message and v.evidence and all("{" in line for line in v.evidence) for v in found)


def test_a_commit_that_no_client_learned_of_may_be_missing(tmp_path: Path) -> None:
    story = restored_run(tmp_path / "storage")
    a_restored_commit_is_only_prepared(story, tmp_path)
    story.drop(
        lambda line: (
            line["op"] in {"checkpoint.latest", "checkpoint.restore"}
            or (line["op"] == "checkpoint.save" and line["result"].get("attempt") == "a2")
        )
    )
    verdict = judge(story.write(tmp_path))
    assert not [v for v in verdict.violations if v.checker == "restores"], verdict.summary()


def test_while_etcd_is_lost_a_client_call_may_end_in_cluster_replaced(tmp_path: Path) -> None:
    story = restored_run(tmp_path / "storage")
    lost_t = story.lines("fault.inject")[0]["t1"]
    story.line("c.w0", 14, "member.heartbeat", args={}, outcome="unknown", error="ClusterReplaced", t=lost_t)
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.PASS, verdict.summary()


def test_an_unacknowledged_barrier_may_be_released_in_an_older_snapshot(tmp_path: Path) -> None:
    story = restored_run(tmp_path / "storage")
    args = _older_snapshot(story)
    story.line("c.w0", 14, "barrier", args=args, outcome="unknown", error="ClusterRestored")
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.PASS, verdict.summary()


def test_a_call_in_flight_may_report_the_loss_later(tmp_path: Path) -> None:
    story = restored_run(tmp_path / "storage")
    lost_t = story.lines("fault.inject")[0]["t1"]
    line = story.line("c.w0", 14, "member.heartbeat", args={}, outcome="unknown", error="ClusterReplaced")
    line["t0"] = lost_t
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.PASS, verdict.summary()


def test_an_etcd_life_without_an_observer_makes_the_verdict_unknown(tmp_path: Path) -> None:
    story = restored_run(tmp_path / "storage")
    story.lines("observer.started")[0]["args"]["life"] = 3
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.UNKNOWN
    assert "2 observers recorded, of etcd's lives [1, 3]; each life has one" in verdict.uncertainties


def test_an_observer_that_lags_at_the_loss_makes_the_verdict_unknown(tmp_path: Path) -> None:
    story = restored_run(tmp_path / "storage")
    story.lines("observer.ended")[0]["args"]["complete"] = False
    assert judge(story.write(tmp_path)).result is Result.UNKNOWN
