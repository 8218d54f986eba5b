"""A listener receives every shard assignment once, whatever happens to the dataset between two assignments."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator
from typing import Any

import pytest

from strata.client.api import shards
from strata.client.api.datasets import DatasetAssignment
from strata.core.ids import WorkerId
from strata.core.kv.records import Assignment, encode
from strata.v1.watch_pb2 import KeyEvent, WatchResponse

LIMIT_S = 20.0


def assigned(assign_epoch: int, *, revision: int, dataset: str = "pages") -> KeyEvent:
    record = Assignment(assign_epoch=assign_epoch, epoch=1, generation=1, shards=4, workers=(WorkerId("w0"),))
    return KeyEvent(key=f"datasets/{dataset}/assignment", value=encode(record), mod_revision=revision)


def deleted(*, revision: int) -> KeyEvent:
    return KeyEvent(key="datasets/pages/assignment", deleted=True, mod_revision=revision)


@pytest.mark.parametrize(
    "between",
    [
        pytest.param([WatchResponse(events=[deleted(revision=12)])], id="deletion is told"),
        pytest.param([], id="a resync has left it out"),
    ],
)
def test_assignments_of_a_reregistered_dataset_are_delivered_again(
    monkeypatch: pytest.MonkeyPatch, between: list[WatchResponse]
) -> None:
    responses = [
        WatchResponse(resync=True, events=[assigned(1, revision=10)]),
        WatchResponse(resync=True, events=[assigned(1, revision=10)]),
        *between,
        WatchResponse(resync=True, events=[assigned(1, revision=14)]),
        WatchResponse(events=[assigned(2, revision=15), assigned(1, revision=15, dataset="more")]),
    ]

    async def watch(*_: Any, **__: Any) -> AsyncIterator[WatchResponse]:
        for response in responses:
            yield response

    monkeypatch.setattr(shards, "watch", watch)
    received: queue.Queue[DatasetAssignment] = queue.Queue()
    assignments: list[tuple[str, int]] = []
    with shards.ShardManager("127.0.0.1:1") as manager:
        manager.listen(received.put)
        while ("more", 1) not in assignments:
            one = received.get(timeout=LIMIT_S)
            assignments.append((one.dataset, one.assign_epoch))
    assert assignments == [("pages", 1), ("pages", 1), ("pages", 2), ("more", 1)]
