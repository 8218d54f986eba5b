from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from strata.core.barriers.outcomes import (
    Arrival,
    BarrierBook,
    BarrierKey,
    OpenRound,
    decide_arrived,
    decide_outcome,
    ended,
    outcome_payloads,
    participants_digest,
    writer_delay_ms,
)
from strata.core.ids import InstanceId, WorkerId
from strata.core.kv.records import (
    MAX_VALUE_BYTES,
    BarrierArrived,
    BarrierFloor,
    BarrierOutcome,
    BarrierResult,
)
from strata.core.kv.txn import MAX_TXN_BYTES, Put
from strata.core.kv.view import Entry
from strata.core.members.membership import decide_rank_exit
from strata.errors import Refused, StaleGeneration
from tests.not_none import not_none
from tests.unit.core.rig import JOB, Observer, Store, carry_out, crowd, lead, leave, register


class Meeting:
    """A world of `size` members of one rank each, and one replica's book of open rounds."""

    def __init__(self, size: int = 3) -> None:
        self.store = Store()
        self.epoch = lead(self.store)
        crowd(self.store, size, name="w{}")
        self.born = {entry.name: entry.create_revision for entry in self.store.job().workers()}
        carry_out(self.store, self.epoch)
        self.size = size
        self.book = BarrierBook()

    def arrive(
        self,
        *ranks: int,
        round_: int = 1,
        generation: int = 1,
        payload: bytes = b"",
        timeout_ms: int = 0,
        phase: str = "",
        participants: tuple[int, ...] = (),
    ) -> OpenRound:
        sent = Arrival(
            job="job",
            name="b",
            generation=generation,
            round=round_,
            ranks=ranks,
            payloads=(payload,) * len(ranks) if payload else (),
            phases=(phase,) * len(ranks) if phase else (),
            timeout_ms=timeout_ms,
            participants=participants,
        )
        return self.book.add(sent, size=self.size, now_ms=0)

    def settle(self, entry: OpenRound, *, now_ms: float = 0) -> str:
        return self.store.settle(lambda job: decide_outcome(job, entry, now_ms=now_ms)).reason

    def outcome(self, round_: int = 1, generation: int = 1) -> BarrierOutcome | None:
        key = JOB.outcome("b", generation, round_)
        return self.store.job().view.record(key, BarrierOutcome)

    def floor(self) -> int:
        record = self.store.job().view.record(JOB.barrier_floor("b", 1), BarrierFloor)
        return record.round if record is not None else 0

    def release(self, round_: int) -> None:
        self.settle(self.arrive(*range(self.size), round_=round_))


def payloads(meeting: Meeting, entry: OpenRound) -> dict[int, bytes]:
    found = ended(meeting.store.job(), entry.key)
    assert isinstance(found, Entry)
    return outcome_payloads(meeting.store.job(), found)


# -- release ----------------------------------------------------------------------------------


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


def test_a_waiting_round_names_the_missing_ranks() -> None:
    meeting = Meeting(4)
    entry = meeting.arrive(0, 1, 3, phase="step")
    assert meeting.settle(entry) == "3 of 4 arrived; waiting for 2"
    decision = decide_outcome(meeting.store.job(), entry, now_ms=0, phases={2: "eval"})
    assert decision.reason == "3 of 4 arrived; waiting for 2 (eval)"
    assert meeting.outcome() is None


def test_the_full_set_releases_with_its_payloads(meeting: Meeting) -> None:
    meeting.arrive(0, payload=b"zero")
    meeting.arrive(1)
    entry = meeting.arrive(2, payload=b"\xff\x00")
    assert "released" in meeting.settle(entry)
    outcome = not_none(meeting.outcome())
    assert outcome.result is BarrierResult.RELEASED
    assert outcome.digest == participants_digest(range(3))
    assert (outcome.generation, outcome.round, outcome.missing) == (1, 1, ())
    assert payloads(meeting, entry) == {0: b"zero", 2: b"\xff\x00"}
    assert meeting.floor() == 1
    assert meeting.store.problems() == []


def test_a_subset_releases_alone_however_late_it_is_full(meeting: Meeting) -> None:
    entry = meeting.arrive(2, 0, participants=(0, 2), timeout_ms=10)
    assert "released" in meeting.settle(entry, now_ms=99_999)
    assert not_none(meeting.outcome()).digest == participants_digest((0, 2))


def test_a_release_is_one_commit_and_deletes_the_older_rounds(meeting: Meeting) -> None:
    meeting.release(1)
    before = meeting.store.revision
    meeting.release(2)
    assert meeting.store.revision == before + 1
    assert (meeting.floor(), meeting.outcome(1)) == (2, None)
    assert meeting.store.problems() == []
    meeting.release(11)
    assert meeting.floor() == 11
    folder = JOB.barrier_generation("b", 1)
    assert meeting.store.job().view.names(folder) == ["000000000011", "floor"]


def test_other_barriers_keep_their_rounds(meeting: Meeting) -> None:
    other = Arrival(job="job", name="b2", generation=1, round=1, ranks=(0, 1, 2))
    meeting.settle(meeting.book.add(other, size=3, now_ms=0))
    meeting.release(1)
    meeting.release(2)
    assert ended(meeting.store.job(), other.key) is not None
    assert meeting.store.job().view.get(JOB.outcome("b2", 1, 1)) is not None


@pytest.mark.parametrize(("size", "payload_bytes"), [(128, 4096), (1000, 524), (30, 1024)])
def test_large_payloads_are_chunked_beside_the_outcome_in_its_transaction(
    size: int, payload_bytes: int
) -> None:
    meeting = Meeting(size)
    entry = meeting.arrive(*range(size), payload=b"\xab" * payload_bytes)
    txn = not_none(decide_outcome(meeting.store.job(), entry, now_ms=0).txn)
    puts = [op for op in txn.success if isinstance(op, Put)]
    assert all(len(put.value) <= MAX_VALUE_BYTES for put in puts)
    assert sum(len(put.key) + len(put.value) for put in puts) < MAX_TXN_BYTES
    meeting.settle(entry)
    assert (not_none(meeting.outcome()).payload_chunks > 0) == (size * payload_bytes > 48 * 1024)
    assert payloads(meeting, entry) == dict.fromkeys(range(size), b"\xab" * payload_bytes)
    meeting.release(2)
    assert meeting.store.problems() == []


# -- break ------------------------------------------------------------------------------------


def test_a_timeout_names_the_missing_ranks_and_their_phases(meeting: Meeting) -> None:
    entry = meeting.arrive(1, timeout_ms=2000)
    assert "waiting" in meeting.settle(entry, now_ms=1999)
    decision = decide_outcome(meeting.store.job(), entry, now_ms=2000, phases={2: "compile"})
    assert "missing 0, 2 (compile)" in decision.reason
    meeting.settle(entry, now_ms=2000)
    outcome = not_none(meeting.outcome())
    assert (outcome.result, outcome.missing) == (BarrierResult.TIMED_OUT, (0, 2))
    assert "timed out after 2.0 s: 1 of 3 arrived" in outcome.reason
    assert meeting.floor() == 0, "only a release moves the floor"
    assert meeting.store.problems() == []


def exits(meeting: Meeting, rank: int, code: int) -> None:
    worker = WorkerId(f"w{rank}")
    meeting.store.settle(lambda job: decide_rank_exit(job, worker, meeting.born[worker], 1, rank, code))


def replaced(meeting: Meeting) -> None:
    leave(meeting.store, "w1")
    register(meeting.store, "w1")


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda meeting: leave(meeting.store, "w1"), "rank 1 was lost with w1"),
        (replaced, "rank 1 was lost with w1"),
        (lambda meeting: exits(meeting, 1, 3), r"rank 1 of w1 failed \(exit code 3\)"),
        (lambda meeting: exits(meeting, 1, 0), "rank 1 is done and will not arrive"),
    ],
)
def test_a_round_breaks_when_a_missing_participant_ends(
    meeting: Meeting, end: Callable[[Meeting], object], why: str
) -> None:
    entry = meeting.arrive(0)
    end(meeting)
    meeting.settle(entry)
    outcome = not_none(meeting.outcome())
    assert (outcome.result, outcome.missing) == (BarrierResult.BROKEN, (1, 2))
    assert re.search(why, outcome.reason)


def test_a_member_that_arrived_or_takes_no_part_may_leave(meeting: Meeting) -> None:
    entry = meeting.arrive(0, 1)
    part = meeting.arrive(0, round_=2, participants=(0, 2))
    leave(meeting.store, "w1")
    assert "waiting" in meeting.settle(entry)
    assert "waiting" in meeting.settle(part)
    meeting.arrive(2)
    assert "released" in meeting.settle(entry)


def test_after_a_break_the_next_round_is_free(meeting: Meeting) -> None:
    meeting.settle(meeting.arrive(1, timeout_ms=10), now_ms=10)
    meeting.release(2)
    assert meeting.floor() == 2
    assert meeting.outcome(1) is None
    assert meeting.store.problems() == []


def test_a_break_of_many_ranks_fits_into_a_value() -> None:
    meeting = Meeting(3)
    meeting.size = 100_000
    entry = meeting.arrive(0, timeout_ms=10)
    decision = decide_outcome(meeting.store.job(), entry, now_ms=10)
    assert meeting.store.execute(not_none(decision.txn)).succeeded
    assert "and 99991 more" in not_none(meeting.outcome()).reason


@pytest.mark.parametrize("release_first", [True, False])
def test_release_and_break_exclude_each_other_at_the_store(meeting: Meeting, *, release_first: bool) -> None:
    view = meeting.store.job()
    entry = meeting.arrive(0, timeout_ms=10)
    breaks = not_none(decide_outcome(view, entry, now_ms=10).txn)
    meeting.arrive(1, 2)
    releases = not_none(decide_outcome(view, entry, now_ms=10).txn)
    first, second = (releases, breaks) if release_first else (breaks, releases)
    written = [meeting.store.execute(txn).succeeded for txn in (first, second, first)]
    assert written == [True, False, False], "nor does the same one count twice"


def test_a_release_races_a_newer_head_and_loses(meeting: Meeting) -> None:
    late = decide_outcome(meeting.store.job(), meeting.arrive(0, 1, 2), now_ms=0)
    carry_after_death(meeting)
    assert not meeting.store.execute(not_none(late.txn)).succeeded


def test_a_release_that_arrives_after_newer_rounds_fails(meeting: Meeting) -> None:
    """t1: the release of round 1 is decided. t2: rounds 1 and 2 are released. t3: the first release arrives."""
    late = decide_outcome(meeting.store.job(), meeting.arrive(0, 1, 2), now_ms=0)
    meeting.release(1)
    meeting.release(2)
    assert not meeting.store.execute(not_none(late.txn)).succeeded, "its outcome is gone, the floor is not"


# -- ended rounds -----------------------------------------------------------------------------


def test_an_arrival_for_a_finished_round_gets_its_outcome(meeting: Meeting) -> None:
    meeting.release(1)
    late = meeting.arrive(2)
    before = meeting.store.revision
    assert "is released" in meeting.settle(late)
    assert meeting.store.revision == before
    carry_after_death(meeting)
    assert "is released" in meeting.settle(late), "of an ended generation, too"


def carry_after_death(meeting: Meeting) -> None:
    leave(meeting.store, "w0")
    carry_out(meeting.store, meeting.epoch)


def test_a_newer_head_ends_a_round_without_a_write(meeting: Meeting) -> None:
    entry = meeting.arrive(0, 1, 2)
    carry_after_death(meeting)
    before = meeting.store.revision
    with pytest.raises(StaleGeneration, match="generation 2"):
        meeting.settle(entry)
    assert meeting.store.revision == before


def test_an_arrival_below_the_barrier_floor_is_refused(meeting: Meeting) -> None:
    for round_ in (1, 2, 3):
        meeting.release(round_)
    with pytest.raises(Refused, match="up to 3"):
        meeting.settle(meeting.arrive(0, round_=2))


def test_a_generation_that_this_view_does_not_know_is_waited_for(meeting: Meeting) -> None:
    lagging = Observer(meeting.store)
    carry_after_death(meeting)
    entry = meeting.arrive(0, 1, generation=2, participants=(0, 1))
    for view in (lagging.job, Store().job()):
        decision = decide_outcome(view, entry, now_ms=0)
        assert (decision.txn, decision.refusal) == (None, None)
        assert "does not know" in decision.reason
    assert "released" in meeting.settle(entry)


# -- the visible counter ----------------------------------------------------------------------


def test_the_arrival_count_names_missing_ranks_and_never_decreases(meeting: Meeting) -> None:

    def show(entry: OpenRound) -> str:
        return meeting.store.settle(lambda job: decide_arrived(job, entry)).reason

    key = JOB.arrived("b", 1, 1)
    show(meeting.arrive(2))
    record = meeting.store.job().view.record(key, BarrierArrived)
    assert record == BarrierArrived(arrived=1, expected=3, missing=(0, 1))
    entry = meeting.arrive(0)
    show(entry)
    late = decide_arrived(meeting.store.job(), meeting.arrive(1))
    behind = BarrierBook().add(
        Arrival(job="job", name="b", generation=1, round=1, ranks=(1,)), size=3, now_ms=0
    )
    before = meeting.store.revision
    show(behind)
    assert meeting.store.revision == before
    meeting.settle(entry)
    assert "has ended" in show(entry)
    assert meeting.store.problems() == []
    meeting.release(2)
    assert not meeting.store.execute(not_none(late.txn)).succeeded, "it does not outlive its round"
    assert meeting.store.job().view.get(key) is None


# -- the replica that writes ------------------------------------------------------------------


def test_ready_replicas_take_turns_to_write_in_an_order_set_by_the_barrier_key() -> None:
    replicas = [InstanceId(f"i-{index}") for index in range(5)]
    first = set()
    for round_ in range(1, 200):
        key = BarrierKey("job", "b", 1, round_)
        delays = [writer_delay_ms(key, me, replicas) for me in replicas]
        assert sorted(delays) == [0, 20, 40, 60, 80]
        first.add(replicas[delays.index(0)])
        fewer = replicas[1:]
        kept = {me: writer_delay_ms(key, me, fewer) for me in fewer}
        by_delay = sorted(fewer, key=lambda me: delays[replicas.index(me)])
        assert sorted(fewer, key=lambda me: kept[me]) == by_delay, "the rest keeps its order"
    assert first == set(replicas)


def test_an_unlisted_replica_counts_itself_in_the_write_order() -> None:
    key = BarrierKey("job", "b", 1, 1)
    assert writer_delay_ms(key, InstanceId("i-0"), []) == 0
    others = [InstanceId("i-1"), InstanceId("i-2")]
    assert writer_delay_ms(key, InstanceId("i-0"), others) in {0, 20, 40}
