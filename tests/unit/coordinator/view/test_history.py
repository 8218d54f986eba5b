"""The ring of changes that relayed watches resume from."""

from __future__ import annotations

import pytest

from strata.coordinator.view.history import History
from strata.core.kv.txn import Event, KeyValue, WatchBatch
from tests.not_none import not_none


def batch(revision: int, events: int = 1) -> WatchBatch:
    kv = KeyValue(key="/k", value=b"", create_revision=1, mod_revision=revision, version=1)
    return WatchBatch(revision=revision, events=(Event(kv=kv),) * events)


def revisions(history: History, since: int) -> list[int] | None:
    found = history.since(since)
    return None if found is None else [b.revision for b in found]


@pytest.fixture
def history() -> History:
    return History()


def test_history_returns_the_batches_after_a_token(history: History) -> None:
    history.reset(10)
    for revision in (11, 14, 15):
        history.append(batch(revision))
    assert revisions(history, 10) == [11, 14, 15]
    assert revisions(history, 13) == [14, 15]
    assert revisions(history, 15) == []


def test_a_token_from_within_a_batch_is_answered_with_the_rest_of_it(history: History) -> None:
    """A watch that catches up gets many revisions in one batch; another replica's batches end at other revisions."""
    history.reset(10)
    caught_up = tuple(event for revision in (11, 12, 14) for event in batch(revision, events=2).events)
    history.append(WatchBatch(revision=14, events=caught_up))
    assert [(b.revision, [e.kv.mod_revision for e in b.events]) for b in not_none(history.since(12))] == [
        (14, [14, 14])
    ]


def test_a_token_older_than_the_history_requires_a_new_list(history: History) -> None:
    history.reset(10)
    assert revisions(history, 9) is None
    assert revisions(history, 10) == []


def test_the_oldest_batches_are_evicted_and_the_first_revision_advances() -> None:
    history = History(max_events=4)
    history.reset(10)
    for revision in (11, 12, 13):
        history.append(batch(revision, events=2))
    assert history.floor == 11
    assert revisions(history, 10) is None
    assert revisions(history, 11) == [12, 13]


def test_a_list_clears_the_history(history: History) -> None:
    history.reset(10)
    history.append(batch(11))
    history.reset(20)
    assert revisions(history, 11) is None
    assert history.floor == 20


def test_progress_notices_take_no_space() -> None:
    history = History(max_events=1)
    history.reset(10)
    for revision in range(11, 1000):
        history.append(batch(revision, events=0))
    assert history.floor == 10
    assert revisions(history, 10) == []
