from __future__ import annotations

from functools import partial

import pytest

from strata.core.checkpoints.pins import (
    MAX_TAGS,
    decide_close_reader,
    decide_open,
    decide_untag,
    reader_lease,
    tagged,
    tags_of,
)
from strata.errors import CheckpointNotFound, Conflict, InvalidArgument, QuotaExceeded, Refused
from tests.not_none import not_none
from tests.unit.core.keeping_job import KeptJob


@pytest.fixture
def job() -> KeptJob:
    return KeptJob(20, 40, 60)


def test_a_tag_names_one_checkpoint_at_a_time(job: KeptJob) -> None:
    for step in (20, 20, 40):
        job.tag("paper", step)
    view = job.store.job()
    assert not_none(tagged(view, "paper")).record.step == 40
    assert tags_of(view, job.record(20)) == []
    assert tags_of(view, job.record(40)) == ["paper"]
    job.delete(20)
    with pytest.raises(Refused, match="tagged paper"):
        job.delete(40)
    for _ in range(2):
        job.store.settle(lambda v: decide_untag(v, tag="paper"))
    assert tagged(job.store.job(), "paper") is None
    job.delete(40)


def test_an_untag_that_names_another_checkpoint_is_a_conflict(job: KeptJob) -> None:
    job.tag("paper", 40)

    def untag(step: int, attempt: str) -> None:
        job.store.settle(lambda v: decide_untag(v, tag="paper", step=step, attempt=attempt))

    for step, attempt in ((20, "x20"), (20, "x40"), (40, "x20")):
        with pytest.raises(Conflict, match="paper names step 40 \\(attempt x40\\)"):
            untag(step, attempt)
    untag(40, "x40")
    assert tagged(job.store.job(), "paper") is None
    untag(40, "x40")


def test_the_number_of_tags_of_a_checkpoint_is_bounded(job: KeptJob) -> None:
    for number in range(MAX_TAGS):
        job.tag(f"t{number}", 20)
    job.tag("t0", 20)
    with pytest.raises(QuotaExceeded, match="256 tags, the limit"):
        job.tag("one-more", 20)
    job.tag("one-more", 40)
    job.store.settle(lambda v: decide_untag(v, tag="t0"))
    job.tag("one-more", 20)


def test_a_checkpoint_under_deletion_takes_no_tag_pin_incremental_or_reader(job: KeptJob) -> None:
    job.delete(20)
    for needs in (partial(job.tag, "t", 20), partial(job.pin, 20), partial(job.incremental, 80, 20)):
        with pytest.raises(Refused, match="is deleting"):
            needs()
    with pytest.raises(Refused, match="deleting and cannot be read"):
        job.open(20)
    job.begin(step=80, attempt="x80")
    with pytest.raises(Refused, match="open and cannot be read"):
        job.open(80)
    for wrong in ("x21", ""):
        with pytest.raises(CheckpointNotFound):
            job.store.settle(
                lambda v, a=wrong: decide_open(v, step=20, attempt=a, reader="r", who="", lease=7)  # type: ignore[misc]  # a bound loop variable
            )
    with pytest.raises(InvalidArgument):
        job.open(40, reader="a/b")


def test_a_reader_keeps_its_checkpoint_and_may_move_to_a_newer_lease(job: KeptJob) -> None:
    job.open(20)
    before = job.store.revision
    job.open(20)
    assert job.store.revision == before
    assert reader_lease(job.store.job(), step=20, attempt="x20", reader="r") == 7
    job.open(20, lease=8)
    assert reader_lease(job.store.job(), step=20, attempt="x20", reader="r") == 8
    with pytest.raises(Refused, match="being read by r"):
        job.delete(20)
    for _ in range(2):
        job.store.settle(lambda v: decide_close_reader(v, step=20, attempt="x20", reader="r"))
    assert reader_lease(job.store.job(), step=20, attempt="x20", reader="r") == 0
    assert reader_lease(job.store.job(), step=21, attempt="x21", reader="r") == 0
    job.delete(20)
