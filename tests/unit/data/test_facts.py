"""What gives a sample cursor its meaning, and the refusal of a cursor that has lost it."""

from __future__ import annotations

from typing import Any

import pytest

from strata.data.facts import ORDER_V1, DatasetFacts, check_unchanged
from strata.errors import ConfigError, DatasetMismatch

PILE = DatasetFacts(dataset="pile", order=ORDER_V1, length=1797, seed=7, fingerprint="sha-1")


def changed(**facts: Any) -> DatasetFacts:
    return DatasetFacts.of(PILE.saved() | facts)


def test_saved_facts_are_read_back() -> None:
    assert DatasetFacts.of(PILE.saved()) == PILE
    assert DatasetFacts.of({}) == DatasetFacts()
    assert DatasetFacts(length=0, seed=0).saved() == {
        "dataset": "default",
        "order": "loader",
        "length": 0,
        "seed": 0,
    }


def test_an_unchanged_dataset_continues_at_any_place() -> None:
    for cursor in (0, 1, 1797):
        check_unchanged(PILE, PILE, epoch=3, cursor=cursor)


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (changed(length=1700), "its number of samples is 1700, and was 1797"),
        (changed(seed=8), "the seed of its order is 8, and was 7"),
        (changed(order="sequential"), "its order is sequential, and was order-v1"),
        (changed(fingerprint="sha-2"), "its fingerprint is sha-2, and was sha-1"),
        (changed(fingerprint=""), "its fingerprint is unknown, and was sha-1"),
        (changed(drawn="ab"), "what its sampler draws is ab, and was unknown"),
    ],
)
def test_a_changed_dataset_is_refused_with_its_name_and_the_position(now: DatasetFacts, why: str) -> None:
    with pytest.raises(DatasetMismatch) as refused:
        check_unchanged(now, PILE, epoch=3, cursor=960)
    assert refused.value.message == f"dataset 'pile': {why}; the training is at sample 960 of epoch 3"
    assert "run.steps(loader, epoch=4)" in refused.value.hint
    assert isinstance(refused.value, ConfigError)
    assert refused.value.lasting


def test_another_dataset_in_the_middle_of_an_epoch_is_refused() -> None:
    with pytest.raises(
        DatasetMismatch, match="dataset 'new' begins, but the training is at sample 9 of epoch 0"
    ):
        check_unchanged(changed(dataset="new"), PILE, epoch=0, cursor=9)


def test_a_cursor_beyond_the_end_is_refused() -> None:
    with pytest.raises(DatasetMismatch, match="it has only 1797 samples; the training is at sample 1798"):
        check_unchanged(PILE, PILE, epoch=0, cursor=1798)
