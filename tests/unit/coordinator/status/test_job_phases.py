"""The metric of job phases covers the existing jobs and no others."""

from __future__ import annotations

from tests.unit.dashboard.rig import KEYS, Shown


async def test_a_job_deleted_after_a_first_read_is_forgotten_at_once() -> None:
    shown = Shown()
    for name in ("gone", "stays"):
        shown.job(name, members=1)
    assert dict(shown.job_phases()) == {"gone": "running", "stays": "running"}
    for kv in list(shown.view.walk(f"{KEYS.jobs}gone")):
        shown.remove(kv.key)
    assert dict(shown.job_phases()) == {"stays": "running"}
