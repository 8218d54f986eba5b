"""The judge of rank kills accepts a good history, and rejects each doctored one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rank_kills import judge
from tests.rank_kills.plan import Moment

Event = dict[str, Any]


def rank(number: int, generation: int, first: int, last: int) -> list[Event]:
    place = {"rank": number, "generation": generation}
    return [
        {"event": "begun", **place, "step": first},
        *(
            {"event": "step", **place, "step": n, "digest": f"{number}-{n}"}
            for n in range(first + 1, last + 1)
        ),
    ]


def end(number: int) -> Event:
    return {"event": "end", "rank": number, "generation": 2, "step": 4, "digest": f"end-{number}"}


def killed() -> list[Event]:
    return [*rank(0, 1, 0, 3), *rank(1, 1, 0, 3), *rank(0, 2, 2, 4), *rank(1, 2, 2, 4), end(0), end(1)]


def undisturbed() -> list[Event]:
    return [*rank(0, 1, 0, 4), *rank(1, 1, 0, 4), end(0), end(1)]


def test_a_good_history_holds() -> None:
    assert list(judge.resumption([10, 10], seen=10, committed=10)) == []
    assert list(judge.resumption([15, 15], seen=10, committed=15)) == [], (
        "committed before anybody heard of it"
    )
    assert list(judge.resumption([0, 0], seen=0, committed=0)) == [], "nothing was committed"
    assert list(judge.bits(killed(), undisturbed())) == []
    assert list(judge.order(killed())) == []
    assert list(judge.retention(["one", "two"], keep_count=2, full_every=1)) == []


@pytest.mark.parametrize(
    ("steps", "seen", "committed", "complaint"),
    [
        ([10, 15], 10, 15, "different steps"),
        ([10, 10], 15, 15, "15 was known to be committed"),
        ([10, 10], 10, 15, "the newest committed step is 15"),
        ([12, 12], 10, 10, "the newest committed step is 10"),
    ],
)
def test_a_wrong_beginning_is_rejected(steps: list[int], seen: int, committed: int, complaint: str) -> None:
    assert complaint in "; ".join(judge.resumption(steps, seen=seen, committed=committed))


@pytest.mark.parametrize(
    ("number", "change", "complaint"),
    [
        (2, {"digest": "other"}, "rank 0 of generation 1 differs at step 2"),
        (-3, {"digest": "other"}, "rank 1 of generation 2 differs at step 4"),
        (-3, {"step": 3, "digest": "1-3"}, "1 steps were never trained, the first by rank and step: (1, 4)"),
        (-3, {"step": 5}, "rank 1 of generation 2 differs at step 5"),
        (-1, {"digest": "other"}, "the training ended with"),
        (-1, {"step": 3}, "the training ended with"),
        (-1, {"event": "line"}, "the training ended with"),
    ],
)
def test_results_that_differ_in_any_bit_are_rejected(number: int, change: Event, complaint: str) -> None:
    events = killed()
    events[number] = events[number] | change
    assert complaint in "; ".join(judge.bits(events, undisturbed()))


def test_an_undisturbed_training_without_an_end_proves_nothing() -> None:
    assert list(judge.bits([], []))


def test_a_step_that_is_skipped_or_repeated_is_rejected() -> None:
    events = killed()
    del events[2]
    assert list(judge.order(events)) == ["rank 0 of generation 1 trained step 3 after 1"]
    events.insert(2, events[2])
    assert "rank 0 of generation 1 trained step 3 after 3" in list(judge.order(events))


def test_a_storage_that_violates_retention_is_rejected() -> None:
    assert list(judge.retention(["one", "two", "three"], keep_count=1, full_every=2))
    assert list(judge.retention([], keep_count=1, full_every=2)), "even the newest is gone"


@pytest.mark.parametrize(
    ("events", "moment"),
    [
        (["restoring"], Moment.RESTORING),
        (["restoring", "saving"], Moment.RESTORING),  # a restore calls the state's getter, too
        (["restoring", "saving", "begun"], Moment.MID_STEP),
        (["begun", "step"], Moment.MID_STEP),
        (["begun", "step", "saving", "step"], Moment.MID_SAVE),
        (["begun", "saving", "committed"], Moment.AFTER_COMMIT),
        (["begun", "saving", "committed", "step"], Moment.MID_STEP),
        (["begun", "saving", "saving", "committed"], Moment.AFTER_COMMIT),
    ],
)
def test_the_moment_of_a_death_is_derived_from_the_events(events: list[str], moment: Moment) -> None:
    assert judge.met([{"event": event} for event in events]) is moment
