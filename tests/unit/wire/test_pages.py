"""The pages of an answer are joined as if the answer had come in one message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strata.errors import StaleGeneration
from strata.v1.datasets_pb2 import GetAssignmentRequest, GetAssignmentResponse, Shards
from strata.wire.pages import TRIES, whole, whole_async

PAGES = {
    "": GetAssignmentResponse(
        assign_epoch=3, workers=["a"], owners={"a": Shards(index=[1])}, next_page_token="1"
    ),
    "1": GetAssignmentResponse(
        workers=["b"], owners={"a": Shards(index=[2]), "b": Shards(index=[3])}, next_page_token="2"
    ),
    "2": GetAssignmentResponse(owners={"a": Shards(index=[4])}),
}


def test_lists_and_maps_of_lists_are_continued() -> None:
    requested: list[Any] = []

    def ask(request: Any) -> GetAssignmentResponse:
        requested.append((request.job, request.page_token))
        answer = GetAssignmentResponse()
        answer.CopyFrom(PAGES[request.page_token])
        return answer

    request = GetAssignmentRequest(job="j")
    answer = whole(ask, request)
    assert requested == [("j", ""), ("j", "1"), ("j", "2")]
    assert request.page_token == ""
    assert (answer.assign_epoch, list(answer.workers), answer.next_page_token) == (3, ["a", "b"], "")
    assert {worker: list(shards.index) for worker, shards in answer.owners.items()} == {
        "a": [1, 2, 4],
        "b": [3],
    }

    async def later(request: Any) -> GetAssignmentResponse:
        return ask(request)

    assert asyncio.run(whole_async(later, request)) == answer


def test_a_replaced_answer_is_requested_again_a_limited_number_of_times() -> None:
    refusals = [2]

    def ask(request: Any) -> GetAssignmentResponse:
        if request.page_token and refusals[0]:
            refusals[0] -= 1
            raise StaleGeneration("replaced")
        answer = GetAssignmentResponse()
        answer.CopyFrom(PAGES[request.page_token])
        return answer

    assert list(whole(ask, GetAssignmentRequest()).workers) == ["a", "b"]
    refusals[0] = TRIES
    with pytest.raises(StaleGeneration):
        whole(ask, GetAssignmentRequest())


def test_a_first_page_that_is_refused_is_the_answer() -> None:
    def ask(_request: Any) -> GetAssignmentResponse:
        raise StaleGeneration("of the job itself")

    with pytest.raises(StaleGeneration, match="of the job itself"):
        whole(ask, GetAssignmentRequest())
