from __future__ import annotations

import pytest

from strata.core.ids import WorkerId
from strata.core.kv.txn import Decision
from strata.core.members.membership import MAX_REASON_CHARS, decide_rank_exit
from strata.errors import InvalidArgument, Refused, StaleGeneration, StaleIncarnation
from tests.not_none import not_none
from tests.unit.core.rig import Observer, Store, carry_out, lead, leave, register


class Trained:
    """A world of two members with two ranks each: w1 runs 0 and 1, w2 runs 2 and 3."""

    def __init__(self) -> None:
        self.store = Store()
        self.epoch = lead(self.store)
        self.born = {
            name: register(self.store, name, slots=2, min_workers=1, max_workers=2) for name in ("w1", "w2")
        }
        carry_out(self.store, self.epoch)

    def ends(
        self,
        worker: str,
        rank: int,
        code: int,
        *,
        generation: int = 1,
        reason: str = "",
        incarnation: int | None = None,
    ) -> Decision:
        born = self.born[worker] if incarnation is None else incarnation
        return self.store.settle(
            lambda job: decide_rank_exit(job, WorkerId(worker), born, generation, rank, code, reason)
        )


@pytest.fixture
def trained() -> Trained:
    return Trained()


def test_exit_code_0_is_done_and_anything_else_failed(trained: Trained) -> None:
    trained.ends("w1", 0, 0)
    trained.ends("w2", 3, -9)
    job = trained.store.job()
    assert job.done(1) == {0}
    failed = job.failed(1)
    assert set(failed) == {3}
    assert (failed[3].worker, failed[3].code) == ("w2", -9)
    assert failed[3].reason == "killed by signal 9"
    assert trained.store.problems() == []


def test_the_first_report_counts(trained: Trained) -> None:
    trained.ends("w1", 0, 1, reason="it raised")
    before = trained.store.revision
    assert "recorded as failed" in trained.ends("w1", 0, 0).reason
    assert "recorded as failed" in trained.ends("w1", 0, 1).reason
    trained.ends("w1", 1, 0)
    assert "recorded as done" in trained.ends("w1", 1, 7).reason
    assert trained.store.revision == before + 1
    assert trained.store.job().failed(1)[0].reason == "it raised"


@pytest.mark.parametrize("codes", [(0, 1), (1, 0)])
def test_done_and_failed_exclude_each_other_at_the_store(trained: Trained, codes: tuple[int, int]) -> None:
    view = trained.store.job()
    first, second = (
        not_none(decide_rank_exit(view, WorkerId("w1"), trained.born["w1"], 1, 0, code).txn) for code in codes
    )
    assert trained.store.execute(first).succeeded
    assert not trained.store.execute(second).succeeded


def test_an_ended_generation_refuses_new_exit_reports_and_confirms_recorded_ones(trained: Trained) -> None:
    trained.ends("w1", 0, 1)
    assert "generation 2" in carry_out(trained.store, trained.epoch)
    assert "recorded" in trained.ends("w1", 0, 1).reason
    with pytest.raises(StaleGeneration):
        trained.ends("w1", 1, 1)


def test_a_report_races_the_next_generation(trained: Trained) -> None:
    lagging = Observer(trained.store)
    trained.ends("w2", 2, 1)
    carry_out(trained.store, trained.epoch)
    late = decide_rank_exit(lagging.job, WorkerId("w1"), trained.born["w1"], 1, 0, 1)
    assert not trained.store.execute(not_none(late.txn)).succeeded


def test_an_exit_report_of_a_departed_member_writes_nothing(trained: Trained) -> None:
    leave(trained.store, "w1")
    before = trained.store.revision
    assert "not registered" in trained.ends("w1", 0, 1).reason
    assert trained.store.revision == before


def test_a_report_races_the_members_own_end(trained: Trained) -> None:
    lagging = Observer(trained.store)
    leave(trained.store, "w1")
    register(trained.store, "w1", slots=2)
    late = decide_rank_exit(lagging.job, WorkerId("w1"), trained.born["w1"], 1, 0, 1)
    assert not trained.store.execute(not_none(late.txn)).succeeded
    with pytest.raises(StaleIncarnation):
        trained.ends("w1", 0, 1)


def test_a_member_speaks_for_its_own_ranks_only(trained: Trained) -> None:
    for worker, rank in (("w1", 2), ("w2", 1), ("w1", 4)):
        with pytest.raises(Refused, match="does not run rank"):
            trained.ends(worker, rank, 1)


def test_an_exit_report_for_a_future_generation_is_refused(trained: Trained) -> None:
    with pytest.raises(Refused, match="no generation 2"):
        trained.ends("w1", 0, 1, generation=2)
    empty = Store()
    born = register(empty, "w1", max_workers=2)
    with pytest.raises(Refused, match="no generation 1"):
        empty.settle(lambda job: decide_rank_exit(job, WorkerId("w1"), born, 1, 0, 1))


@pytest.mark.parametrize(("generation", "rank"), [(1, -1), (-1, 0)])
def test_nonsense_is_refused(generation: int, rank: int) -> None:
    with pytest.raises(InvalidArgument):
        Store().settle(lambda job: decide_rank_exit(job, WorkerId("w1"), 5, generation, rank, 1))


def test_a_long_reason_is_cut(trained: Trained) -> None:
    trained.ends("w1", 0, 1, reason="x" * 100_000)
    assert len(trained.store.job().failed(1)[0].reason) == MAX_REASON_CHARS
