from __future__ import annotations

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.barriers.arrivals import (
    MAX_OPEN_ROUNDS,
    MAX_PHASE_CHARS,
    Arrival,
    BarrierBook,
    BarrierKey,
    OpenRound,
    participants_digest,
    payload_limit,
)
from strata.errors import InvalidArgument, QuotaExceeded
from tests.not_none import not_none


def arrival(*ranks: int, **changes: object) -> Arrival:
    base = Arrival(job="job", name="b", generation=1, round=1, ranks=ranks)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]  # a table of fields


def add(book: BarrierBook, sent: Arrival, *, size: int = 4, now_ms: float = 0) -> OpenRound:
    return book.add(sent, size=size, now_ms=now_ms)


KEY = BarrierKey("job", "b", 1, 1)


# -- merging ----------------------------------------------------------------------------------


@pytest.fixture
def book() -> BarrierBook:
    return BarrierBook()


def test_a_round_is_complete_when_every_participant_has_arrived(book: BarrierBook) -> None:
    add(book, arrival(0))
    entry = add(book, arrival(2, 3))
    assert (entry.complete, entry.missing()) == (False, [1])
    assert add(book, arrival(1)) is entry
    assert (entry.complete, entry.missing()) == (True, [])
    assert add(book, arrival(3, round=2, participants=(3, 1))).missing() == [1]
    assert add(book, arrival(1, round=2, participants=(1, 3))).complete


def test_a_duplicate_changes_nothing_and_the_first_payload_stands(book: BarrierBook) -> None:
    add(book, arrival(0, payloads=(b"first",)))
    add(book, arrival(0, payloads=(b"second",)))
    entry = add(book, arrival(0, 1, payloads=(b"third", b"new")))
    assert entry.arrived == {0: b"first", 1: b"new"}


def test_of_a_long_phase_only_the_beginning_is_kept_and_forwarded(book: BarrierBook) -> None:
    added = add(book, arrival(0, phases=("p" * 1_000_000,)))
    assert added.arrival(0.0).phases == ("p" * MAX_PHASE_CHARS,)


def test_the_oldest_age_and_the_earliest_deadline_stand(book: BarrierBook) -> None:
    add(book, arrival(0, age_ms=100, timeout_ms=5000), now_ms=1000)
    add(book, arrival(1, age_ms=700, timeout_ms=5000), now_ms=1000)
    add(book, arrival(2, timeout_ms=1000), now_ms=9000)
    add(book, arrival(3), now_ms=1000)
    entry = not_none(book.get(KEY))
    assert (entry.since_ms, entry.deadline_ms) == (300, 5300)
    endless = add(book, arrival(0, round=2))
    assert (endless.deadline_ms, endless.arrival(50).timeout_ms) == (None, 0)


@given(
    st.permutations(range(6)),
    st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_the_order_of_arrivals_does_not_matter(order: list[int], again: list[int], ages: list[int]) -> None:
    def book_of(ranks: list[int]) -> BarrierBook:
        book = BarrierBook()
        for rank in ranks:
            sent = arrival(rank, payloads=(b"p%d" % rank,), age_ms=ages[rank], timeout_ms=100)
            book.add(sent, size=6, now_ms=10)
        return book

    one = book_of([*order, *again]).get(KEY)
    other = book_of(list(range(6))).get(KEY)
    assert one is not None
    assert other is not None
    assert one.arrived == other.arrived
    assert (one.since_ms, one.deadline_ms) == (other.since_ms, other.deadline_ms)


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.binary(max_size=3), st.integers(0, 50), st.integers(0, 90)),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 40),
)
def test_forwarded_arrivals_make_the_same_round_elsewhere(
    sent: list[tuple[int, bytes, int, int]], later_ms: int
) -> None:
    here, there = BarrierBook(), BarrierBook()
    for rank, payload, age_ms, timeout_ms in sent:
        one = arrival(
            rank,
            payloads=(payload,),
            age_ms=age_ms,
            timeout_ms=timeout_ms,
            phases=(f"phase {rank}",),
        )
        here.add(one, size=8, now_ms=100)
    mine = not_none(here.get(KEY))
    there.add(mine.arrival(100 + later_ms), size=8, now_ms=5000 + later_ms)
    theirs = not_none(there.get(KEY))
    assert theirs.arrived == mine.arrived
    assert theirs.phases == mine.phases
    assert theirs.digest == mine.digest
    assert theirs.since_ms - 5000 == mine.since_ms - 100
    assert (theirs.deadline_ms or 5000) - 5000 == (mine.deadline_ms or 100) - 100


def test_an_arrival_can_be_forwarded_for_some_of_its_ranks(book: BarrierBook) -> None:
    add(book, arrival(0, 1, 2, payloads=(b"a", b"", b"c")))
    entry = not_none(book.get(KEY))
    part = entry.arrival(0, ranks=(2, 1, 3))
    assert (part.ranks, part.payloads) == ((1, 2), (b"", b"c"))
    assert entry.arrival(0, ranks=(1,)).payloads == ()


# -- participants -----------------------------------------------------------------------------


def test_listing_every_rank_equals_the_default_participants(book: BarrierBook) -> None:
    add(book, arrival(0))
    add(book, arrival(1, participants=(3, 2, 1, 0)))
    assert not_none(book.get(KEY)).digest == participants_digest(range(4))


def test_a_mismatch_names_the_difference(book: BarrierBook) -> None:
    add(book, arrival(0, participants=(0, 1, 2)))
    with pytest.raises(InvalidArgument, match=r"only these name 3; only those name 1-2"):
        add(book, arrival(3, participants=(0, 3)))
    with pytest.raises(InvalidArgument, match=r"only these name 3; only those name none"):
        add(book, arrival(3))
    assert set(not_none(book.get(KEY)).arrived) == {0}


def test_the_digest_is_the_sha256_of_the_ranks_as_runs() -> None:
    assert participants_digest((2, 0, 1, 7)) == hashlib.sha256(b"0-2,7").hexdigest()


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        arrival(),
        arrival(0, 0),
        arrival(4),
        arrival(-1),
        arrival(0, participants=(1, 2)),
        arrival(0, participants=(0, 4)),
        arrival(0, participants=(0, 0)),
        arrival(0, participants=(-1, 0)),
        arrival(0, round=0),
        arrival(0, generation=0),
        arrival(0, name="a/b"),
        arrival(0, 1, payloads=(b"one",)),
        arrival(0, phases=("a", "b")),
        arrival(0, age_ms=-1),
        arrival(0, age_ms=2**63 - 1),
        arrival(0, timeout_ms=2**63 - 1),
        arrival(0, timeout_ms=-1),
    ],
)
def test_a_malformed_arrival_is_refused_and_leaves_no_trace(book: BarrierBook, wrong: Arrival) -> None:
    with pytest.raises(InvalidArgument):
        add(book, wrong)
    assert len(book) == 0
    if wrong.key == KEY:
        add(book, arrival(2))
        with pytest.raises(InvalidArgument):
            add(book, wrong)
        assert set(not_none(book.get(KEY)).arrived) == {2}


def test_payloads_have_a_limit_that_the_round_shares() -> None:
    assert payload_limit(4) == 4096
    assert payload_limit(128) == 4096
    assert payload_limit(1000) == 524
    book = BarrierBook()
    add(book, arrival(0, payloads=(b"x" * 4096,)))
    with pytest.raises(QuotaExceeded, match="4097 bytes is above 4096"):
        add(book, arrival(1, 2, payloads=(b"", b"x" * 4097)))
    with pytest.raises(QuotaExceeded, match="above 524"):
        add(BarrierBook(), arrival(0, payloads=(b"x" * 525,)), size=1000)


def test_the_number_of_open_rounds_of_a_job_is_bounded(book: BarrierBook) -> None:
    for round_ in range(1, MAX_OPEN_ROUNDS + 1):
        add(book, arrival(0, round=round_))
    with pytest.raises(QuotaExceeded, match="open at once"):
        add(book, arrival(0, round=MAX_OPEN_ROUNDS + 1))
    add(book, arrival(1, round=1))
    add(book, arrival(0, job="other"))
    book.drop(KEY)
    add(book, arrival(0, round=MAX_OPEN_ROUNDS + 1))


# -- the book of open rounds ------------------------------------------------------------------


def test_rounds_are_kept_apart_by_job_name_generation_and_round(book: BarrierBook) -> None:
    sent = [
        arrival(0),
        arrival(0, job="other"),
        arrival(0, name="c"),
        arrival(0, generation=2),
        arrival(0, round=2),
    ]
    for one in sent:
        add(book, one)
    assert len(book) == 5
    assert {entry.key for entry in book.open()} == {one.key for one in sent}
    assert len(list(book.open("job"))) == 4
    assert list(book.open("nobody")) == []


def test_rounds_can_be_dropped_while_they_are_listed(book: BarrierBook) -> None:
    for round_ in range(1, 5):
        add(book, arrival(0, round=round_))
    for entry in book.open():
        book.drop(entry.key)
        book.drop(entry.key)
    assert book.get(KEY) is None
    assert len(book) == 0
