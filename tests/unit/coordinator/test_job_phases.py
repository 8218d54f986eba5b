"""Where each job stands is kept for the jobs that there are, and for no others."""

from __future__ import annotations

from tests.unit.dashboard.rig import KEYS, Shown


async def test_jobs_that_came_and_went_while_nobody_asked_are_forgotten() -> None:
    shown = Shown()
    shown.job("stays", members=1)
    for number in range(100):
        shown.job(f"job-{number}", members=1)
        for kv in list(shown.view.walk(f"{KEYS.jobs}job-{number}")):
            shown.remove(kv.key)
    assert shown.phases.waiting() == 1
    assert dict(shown.job_phases()) == {"stays": "running"}


async def test_a_job_that_is_deleted_after_somebody_asked_is_forgotten_at_once() -> None:
    shown = Shown()
    shown.job("gone", members=1)
    assert dict(shown.job_phases()) == {"gone": "running"}
    for kv in list(shown.view.walk(f"{KEYS.jobs}gone")):
        shown.remove(kv.key)
    assert shown.phases.waiting() == 0
    assert dict(shown.job_phases()) == {}
