"""Checkpoint records as messages: the message that every push carries stays small."""

from __future__ import annotations

from strata.core.checkpoints.lifecycle import newest
from strata.wire.checkpoints import REPORT_CHARS, REPORTS, checkpoint_message, checkpoint_with_reports
from tests.unit.core.keeping_job import KeptJob


def test_corruption_reports_are_sent_on_request_only_and_are_bounded() -> None:
    job = KeptJob(a=1, b=1)
    job.save(40)
    job.damage(40, "host-a", reason="a bit")
    for host in range(100):
        job.damage(40, f"host-b{host}", unread=True, reason="could not connect " * 50)
    entry = newest(job.store.job())
    assert entry is not None
    assert list(checkpoint_message(job.store.job(), entry).corruption_reports) == []
    reports = checkpoint_with_reports(job.store.job(), entry).corruption_reports
    assert len(reports) == REPORTS
    assert reports[0] == "host-a on primary: found damage: a bit"
    assert {len(each) for each in reports[1:]} == {REPORT_CHARS}
    assert reports[1].endswith("…")
