"""The sample cursor of each dataset: what a checkpoint has of it, and which datasets it can continue in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.datasets.cursors import SAMPLES_KEY, SampleCursor, cursors_of
from strata.errors import DatasetMismatch, InvalidArgument
from strata.training.loop.training_data import digest_of_entries

LENGTH, BATCH = 50, 10


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRATA_SOCKET", "STRATA_ENDPOINTS", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def sampler(length: int = LENGTH, **settings: Any) -> strata.ElasticSampler:
    return strata.ElasticSampler(length, global_batch=BATCH, **settings)


def begun(folder: Path, **settings: Any) -> tuple[strata.Run, dict[str, Any]]:
    state = {"sum": np.zeros(1)}
    return strata.init(state=state, storage_path=folder, save_every_steps=10**6, **settings), state


def left_after(
    folder: Path, steps: int, *loaders: Any, epochs: int = 2, dataset: str = "default"
) -> list[int]:
    """Train some steps, save, and leave as a killed process leaves; return the samples."""
    run, _ = begun(folder)
    used: list[int] = []
    for number in range(epochs):
        for batch in run.steps(loaders[number % len(loaders)], dataset=dataset):
            if run.begun > steps:
                break  # in the middle of the next step
            used += batch
        if run.step == steps:
            break
    run.save(wait=True)
    run.abandon("the test leaves it")
    return used


def cursors(folder: Path) -> tuple[SampleCursor, ...]:
    restored = CheckpointManager(folder).restore({})
    assert restored is not None
    return cursors_of(restored.metadata)


def rest(
    folder: Path, loader: Any, *, epochs: int = 2, dataset: str = "default", **settings: Any
) -> list[int]:
    run, _ = begun(folder, **settings)
    try:
        return [i for _ in range(epochs) for batch in run.steps(loader, dataset=dataset) for i in batch]
    finally:
        run.abandon("the test leaves it")


def test_a_checkpoint_has_the_cursor_of_each_dataset(tmp_path: Path) -> None:
    run, _ = begun(tmp_path)
    for _ in run.steps(sampler(seed=7), dataset="pile"):
        pass
    for _ in run.steps(sampler(30, shuffle=False), dataset="code"):
        if run.begun == 8:
            break
    run.save(wait=True)
    run.abandon("the test leaves it")
    assert cursors(tmp_path) == (
        SampleCursor(dataset="code", epoch=1, samples=20, length=30, order="sequential"),
        SampleCursor(dataset="pile", epoch=0, samples=50, length=50, order="order-v1", seed=7),
    )


def test_a_restart_uses_each_sample_once(tmp_path: Path) -> None:
    used = left_after(tmp_path, 3, sampler(seed=7))
    assert sorted(used + rest(tmp_path, sampler(seed=7), epochs=1)) == list(range(LENGTH))


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (sampler(60), "its number of samples is 60, and was 50"),
        (sampler(20), "its number of samples is 20, and was 50"),
        (sampler(seed=1), "the seed of its order is 1, and was 0"),
        (sampler(shuffle=False), "its order is sequential, and was order-v1"),
        (sampler(fingerprint="b"), "its fingerprint is b, and was unknown"),
    ],
)
def test_a_dataset_that_changed_in_the_middle_of_an_epoch_is_refused(
    now: strata.ElasticSampler, why: str, tmp_path: Path
) -> None:
    left_after(tmp_path, 3, sampler(), dataset="pile")
    with pytest.raises(
        DatasetMismatch, match=f"dataset 'pile': {why}.*; the training is at sample 30 of epoch 0"
    ):
        rest(tmp_path, now, dataset="pile")
    assert cursors(tmp_path)[0].samples == 30, "nothing was trained on, and nothing is lost"


def test_another_dataset_in_the_middle_of_an_epoch_is_refused(tmp_path: Path) -> None:
    left_after(tmp_path, 3, sampler(), dataset="pile")
    with pytest.raises(DatasetMismatch, match="dataset 'code' begins, but the training is at sample 30"):
        rest(tmp_path, sampler(), dataset="code")


def test_a_dataset_may_change_between_epochs(tmp_path: Path) -> None:
    left_after(tmp_path, 5, sampler())
    assert sorted(rest(tmp_path, sampler(60, seed=3))) == list(range(60)), (
        "epoch 0 is over, epoch 1 has all samples"
    )


def test_a_dataset_may_get_another_name_between_epochs(tmp_path: Path) -> None:
    left_after(tmp_path, 5, sampler(), dataset="old")
    assert sorted(rest(tmp_path, sampler(), dataset="new")) == list(range(LENGTH))


def test_inexact_samples_are_accepted_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left_after(tmp_path, 3, sampler())
    assert len(rest(tmp_path, sampler(60), epochs=1, exact_samples=False)) == 30
    assert "some samples come twice, or never" in caplog.text


def test_a_cursor_beyond_a_shorter_dataset_ends_the_epoch_on_request(tmp_path: Path) -> None:
    left_after(tmp_path, 3, sampler())
    assert len(rest(tmp_path, sampler(20), exact_samples=False)) == 20, (
        "the rest of epoch 0, and then epoch 1"
    )


def test_the_rest_of_an_epoch_can_be_left_out(tmp_path: Path) -> None:
    left_after(tmp_path, 3, sampler())
    run, _ = begun(tmp_path)
    used = [i for batch in run.steps(sampler(60), epoch=1) for i in batch]
    run.abandon("the test leaves it")
    assert sorted(used) == list(range(60))


class Stream:
    """A loader without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([i] for i in range(self.count))


def test_the_position_in_an_ordinary_loader_is_counted(tmp_path: Path) -> None:
    left_after(tmp_path, 3, Stream(5))
    assert cursors(tmp_path) == (SampleCursor(dataset="default", epoch=0, samples=3, order="loader"),)
    assert rest(tmp_path, Stream(5), epochs=1) == [3, 4]
    assert rest(tmp_path, Stream(2), epochs=1) == [], "a shorter iterable is over"


def test_a_dataset_has_a_valid_name(tmp_path: Path) -> None:
    run, _ = begun(tmp_path)
    with pytest.raises(InvalidArgument, match="dataset"):
        run.steps(sampler(), dataset="no/slash")
    for number in range(32):
        list(run.steps(sampler(), dataset=f"d{number}"))
        run.save()
    with pytest.raises(InvalidArgument, match="'one-more' would be dataset 33"):
        run.steps(sampler(), dataset="one-more")
    run.abandon("the test leaves it")


def test_ranks_on_other_samples_have_another_digest() -> None:
    def digest(name: str = "pile", **entry: Any) -> str:
        return digest_of_entries({"dataset": name, "datasets": {name: {"epoch": 1, "cursor": 30, **entry}}})

    known: dict[str, Any] = {"order": "order-v1", "length": 50}
    assert digest(**known) == digest(**known)
    assert (
        len(
            {
                digest(**known),
                digest(**known | {"length": 49}),
                digest(**known, cursor=20),
                digest("other", **known),
            }
        )
        == 4
    )
    assert digest(order="loader") == digest(order="loader", cursor=29), (
        "its ranks' batches may differ in size"
    )
    assert digest_of_entries({"datasets": {}}) == ""


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "3",
        '{"a": 3}',
        '{"a": {"epoch": -1}}',
        '{"a": {"epoch": true}}',
        '{"a": {"order": 3}}',
        '{"a": {"cursor": 1e400}}',
    ],
)
def test_metadata_that_is_no_cursor_is_left_out(text: str) -> None:
    assert cursors_of({SAMPLES_KEY: text}) == ()


def test_cursors_are_bounded() -> None:
    many = {f"d{number:03d}": {"epoch": 0, "cursor": 1, "order": "x" * 300} for number in range(99)}
    found = cursors_of({SAMPLES_KEY: json.dumps(many | {"n" * 500: {"epoch": 0, "cursor": 1}})})
    assert len(found) == 32
    assert max(len(one.order) for one in found) == 128
