"""Copies on hosts' own disks: a search on the operator's host proves nothing about other hosts' disks."""

from __future__ import annotations

import dataclasses

import pytest

from strata.core.checkpoints.fork import decide_rewind
from strata.core.checkpoints.tiers import tiers_of
from strata.core.kv.records import CheckpointRecord, CheckpointState, Tier, TierState, decode, encode
from strata.core.restore.control_plane import UNSEARCHED_GENERATIONS
from strata.core.restore.storage_evidence import Found
from tests.unit.core.checkpoint_job import ROOT
from tests.unit.core.lost_etcd import LostJob, at, found_of, listed, only_job, records, restored, states
from tests.unit.core.rig import JOB

LOCAL = "file:///local"
SHARED = "s3://s3"
WARNING = f"{LOCAL} is local to each host: copies not found here stay as recorded"


def host_only(job: LostJob, *steps: int) -> dict[str, bytes]:
    """Return the job's keys, with a further copy of each step on its saving host's disk."""
    base = job.base()
    for step in steps:
        record = job.record(step)
        path = record.path.replace(ROOT, LOCAL)
        changed = dataclasses.replace(
            record, tiers={**tiers_of(record), "local": Tier(path=path, shared=False)}
        )
        base[JOB.checkpoint(record.step, record.generation)] = encode(changed)
    return base


def local_of(base: dict[str, bytes], step: int) -> CheckpointRecord:
    return decode(CheckpointRecord, base[JOB.checkpoint(step, 1)])


@pytest.mark.parametrize("how", ["absent", "damaged", "unread", "not listed"])
def test_a_search_of_one_host_never_drops_copies_on_other_hosts_disks(how: str) -> None:
    job = LostJob(20, 40)
    base = host_only(job, 20, 40)
    path = local_of(base, 40).tiers["local"].path
    found = job.found(ROOT)
    proven = found_of(job.record(20), LOCAL)
    found = at(
        found,
        roots=(ROOT, LOCAL),
        listed=listed(ROOT) if how == "not listed" else listed(ROOT, LOCAL),
        checkpoints=(*found.checkpoints, proven),
        damaged={path: "a bit"} if how == "damaged" else {},
        unread={path: "busy"} if how == "unread" else {},
    )
    result, store = restored(base, found)
    for step in (20, 40):
        assert records(store)[step].tiers["local"] == local_of(base, step).tiers["local"]
    assert only_job(result).changes.warnings == [WARNING]
    assert only_job(result).changes.fewer_copies == []


def test_a_checkpoint_on_hosts_own_disks_alone_is_not_forgotten() -> None:
    job = LostJob(20)
    record = job.record(20)
    path = record.path.replace(ROOT, LOCAL)
    alone = dataclasses.replace(record, path=path, tiers={"primary": Tier(path=path, shared=False)})
    base = job.base() | {JOB.checkpoint(20, 1): encode(alone)}
    result, store = restored(base, Found(roots=(LOCAL,), listed=listed(LOCAL), generations={"job": 0}))
    assert states(store) == {20: "committed"}
    assert records(store)[20].tiers["primary"].state is TierState.PRESENT
    assert only_job(result).changes.lost == []


def test_an_attempt_found_elsewhere_does_not_take_a_host_local_slot() -> None:
    """The committed attempt may be whole on its host, so another marked attempt does not take its slot."""
    job = LostJob(20)
    record = job.record(20)
    path = record.path.replace(ROOT, LOCAL)
    alone = dataclasses.replace(record, path=path, tiers={"primary": Tier(path=path, shared=False)})
    base = job.base() | {JOB.checkpoint(20, 1): encode(alone)}
    other = found_of(dataclasses.replace(record, attempt="y20"))  # type: ignore[arg-type]  # any id
    found = Found(roots=(ROOT, LOCAL), listed=listed(ROOT, LOCAL), checkpoints=(other,))
    _result, store = restored(base, found)
    assert records(store)[20].attempt == "x20"
    assert records(store)[20].state is CheckpointState.COMMITTED


# -- generations known only to an unsearched disk


def test_generations_of_a_root_that_was_not_searched_are_stepped_over() -> None:
    """After the backup the job saved in further generations, whose folders still exist."""
    job = LostJob(20)
    base = job.base()
    whole = job.found()
    for found, step in (
        (whole, 1),
        (Found(), UNSEARCHED_GENERATIONS),
        (Found(roots=(ROOT,)), UNSEARCHED_GENERATIONS),
        (Found(roots=(LOCAL,), listed=listed(LOCAL)), UNSEARCHED_GENERATIONS),
    ):
        assert only_job(restored(base, found)[0]).generation == 1 + step
    assert only_job(restored(host_only(job, 20), whole)[0]).generation == 1 + UNSEARCHED_GENERATIONS


def test_a_job_without_a_record_skips_generations_if_no_root_was_searched() -> None:
    base = LostJob().base()
    assert only_job(restored(base, Found())[0]).generation == 1 + UNSEARCHED_GENERATIONS
    found = Found(roots=(ROOT,), listed=listed(ROOT), generations={"job": 0})
    assert only_job(restored(base, found)[0]).generation == 2


# -- checkpoints after retention


def test_a_generation_whose_first_checkpoint_was_removed_is_named() -> None:
    """The world's restore point was in the marker that retention removed."""
    job = LostJob(20, 40)
    base = job.base()
    job.store.settle(lambda view: decide_rewind(view, generation=1, step=20))
    job.plan()
    job.saves(30, 50)
    assert only_job(restored(base, job.found())[0]).changes.warnings == []
    job.delete(30)
    job.removed(30)
    for known in (base, {}):
        result, store = restored(known, job.found())
        (warning,) = only_job(result).changes.warnings
        assert warning == (
            "generation 2 began from an unknown checkpoint; its first checkpoint that is left is step 50,"
            " and the checkpoints that it gave up count again"
        )
        assert store.live.restored(2) is None
    alone = tuple(each for each in job.found().checkpoints if each.generation == 2)
    result, _store = restored({}, at(job.found(), checkpoints=alone))
    assert only_job(result).changes.warnings == [], "there is nothing that it could have given up"


# -- the host of an adopted copy


def test_an_adopted_copy_is_local_if_other_records_of_its_root_are() -> None:
    job = LostJob(20)
    base = host_only(job, 20)
    job.save(40)
    local = tuple(found_of(job.record(step), LOCAL) for step in (20, 40))
    found = at(job.found(), roots=(ROOT, LOCAL), listed=listed(ROOT, LOCAL))
    found = at(found, checkpoints=(*found.checkpoints, *local))
    _result, store = restored(base, found)
    assert {name: tier.shared for name, tier in records(store)[40].tiers.items()} == {
        "primary": True,
        "local": False,
    }


@pytest.mark.parametrize(("root", "shared"), [(LOCAL, False), (SHARED, True)])
def test_copies_in_a_local_folder_without_a_record_count_as_host_local(root: str, shared: bool) -> None:
    job = LostJob(20)
    found = at(job.found(), roots=(ROOT, root), listed=listed(ROOT, root))
    found = at(found, checkpoints=(*found.checkpoints, found_of(job.record(20), root)))
    result, store = restored(job.base(), found)
    (new,) = [tier for tier in records(store)[20].tiers.values() if tier.path.startswith(root)]
    assert new.shared is shared
    assert only_job(result).changes.warnings == (
        []
        if shared
        else [f"no record names {root}: its copies count as local to one host, and no restore reads them"]
    )


def test_the_roots_of_a_job_without_records_count_as_shared() -> None:
    """No record names their host, and no rank would restore a copy that belongs to an unknown host."""
    job = LostJob(20)
    _result, store = restored({}, job.found())
    assert all(tier.shared for tier in records(store)[20].tiers.values())
