"""A worker's restore point: its present ranks, and the parts that ranks of these numbers saved."""

from __future__ import annotations

from strata.core.worlds.restore_point import ranks_of, recovery_point
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import Job
from tests.unit.core.rig import carry_out, leave, register


def test_each_rank_restores_the_part_saved_by_the_same_rank_number() -> None:
    job = Job(a=2, b=1)
    assert recovery_point(job.store.job(), "a") is None
    job.save(20)
    job.next_world()
    view = job.store.job()
    world = not_none(view.world())
    assert (ranks_of(world, "a"), ranks_of(world, "b"), ranks_of(world, "c")) == ([0, 1], [2], [])
    point = not_none(recovery_point(view, "a"))
    assert point.entry.record.step == 20
    assert point.parts == {0: "d0", 1: "d1"}
    assert not_none(recovery_point(view, "c")).parts == {}


def test_a_rank_beyond_the_saving_world_has_no_part_to_restore() -> None:
    job = Job(a=2, b=1)
    job.save(20)
    leave(job.store, "b")
    register(job.store, "c", slots=2)
    job.close()
    carry_out(job.store, job.epoch, settled=True)
    point = not_none(recovery_point(job.store.job(), "c"))
    assert point.parts == {2: "d2", 3: ""}
