"""`strata verify-run` on real folders of checkpoints: equal trainings, and the first difference of others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.storage import root
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.kv.records import CheckpointType
from strata.data.sampler import ElasticSampler
from strata.training.init import init
from tests.unit.checkpoint.parted import divided
from tests.unit.checkpoint.ranks import Ranks
from tests.unit.cli.in_process import run_command

LENGTH = 48
Change = Callable[[int, dict[str, Any]], None]


def unchanged(step: int, state: dict[str, Any]) -> None:
    pass


def train(
    folder: Path,
    *,
    change: Change = unchanged,
    steps: int = 6,
    every: int = 2,
    sampler: ElasticSampler | None = None,
    **settings: Any,
) -> Path:
    """Train alone for some steps, with `change` after each of them; return the storage root."""
    state: dict[str, Any] = {
        "model": {"w": np.zeros((3, 4), np.float32), "b": np.zeros(4, np.float32)},
        "optim": {"momentum": np.zeros((3, 4), np.float32), "lr": 0.1},
        "ema": np.zeros(4),
    }
    run = init(
        state=state, storage_path=folder, save_every_steps=every, keep_count=0, job="default", **settings
    )
    for indices in run.steps(sampler or ElasticSampler(LENGTH, global_batch=8, seed=7)):
        if run.step == steps:
            break
        state["model"]["w"] += np.float32(np.mean(indices))
        state["optim"]["momentum"] += 1
        change(run.step + 1, state)
    run.close()
    return folder


def run(*words: object, code: int = 0) -> str:
    return run_command("verify-run", *words, code=code, columns=80)


def values(*words: object, code: int = 0) -> Any:
    return json.loads(run(*words, "--json", code=code))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the environment name no world and no settings."""
    for name in [name for name in os.environ if name.startswith("STRATA_")]:
        monkeypatch.delenv(name)


def test_equal_trainings_are_equal_and_what_was_compared_is_shown_in_80_columns(tmp_path: Path) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", full_every=2)
    lines = run(a, b).splitlines()
    assert lines[:3] == [
        f"A: {a.as_uri()}",
        f"B: {b.as_uri()}",
        "3 steps are equal; the last, step 6:",
    ]
    assert [line.split() for line in lines[3:-2]] == [
        ["GROUP", "COMPARED", "DIFFERENT", "FIRST"],
        ["model", "2", "0"],
        ["optim", "2", "0"],
        ["other", "1", "0"],
        ["samples", "13", "0"],
    ]
    assert lines[-2].split()[0] == "random"
    assert lines[-1] == "equal"
    assert all(len(line) <= 80 for line in lines[2:])


def test_the_first_step_and_tensor_that_differ_are_named_with_their_elements(tmp_path: Path) -> None:
    def change(step: int, state: dict[str, Any]) -> None:
        if step == 3:
            state["model"]["w"][0, :2] += np.float32(1)
            state["model"]["w"][2, 3] -= np.float32(2.5)
            state["ema"][0] = 1

    a, b = train(tmp_path / "a"), train(tmp_path / "b", change=change)
    lines = run(a, b, code=1).splitlines()
    assert lines[2] == "1 step is equal, then step 4 differs:"
    assert "model    2         1          model.w" in lines
    assert "other    1         1          ema" in lines
    assert lines[-2:] == [
        "model.w: float32[3, 4], 3 of 12 elements differ, by at most 2.5",
        "differ",
    ]
    found = values(a, b, code=1)
    assert (found["equal"], found["steps"], found["step"]) == (False, [2, 4], 4)
    assert found["groups"]["model"] == {"compared": 2, "different": ["model.w"]}
    assert found["groups"]["optim"] == {"compared": 2, "different": []}
    assert found["first"] == {
        "group": "model",
        "path": "model.w",
        "ranks": None,
        "a": "float32[3, 4]",
        "b": "float32[3, 4]",
        "elements": 12,
        "different": 3,
        "largest": 2.5,
    }


def test_entries_at_ignored_paths_are_left_out(tmp_path: Path) -> None:
    def change(step: int, state: dict[str, Any]) -> None:
        state["optim"]["lr"] = 0.2
        state["ema"][0] = 1

    a, b = train(tmp_path / "a"), train(tmp_path / "b", change=change)
    assert "optim.lr: 0.1 in A, 0.2 in B" in run(a, b, code=1)
    assert "ema: float64[4], 1 of 4 elements differ, by at most 1\n" in run(a, b, "--ignore", "optim", code=1)
    assert run(a, b, "--ignore", "optim.lr", "--ignore", "ema").endswith("\nequal\n")


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (ElasticSampler(LENGTH, global_batch=8, seed=8), "strata.loader.seed: 7 in A, 8 in B"),
        (ElasticSampler(LENGTH + 1, global_batch=8, seed=7), "strata.loader.length: 48 in A, 49 in B"),
        (ElasticSampler(LENGTH, global_batch=4, seed=7), "strata.epoch_samples: 16 in A, 8 in B"),
    ],
)
def test_other_samples_differ_in_their_own_group(
    sampler: ElasticSampler, message: str, tmp_path: Path
) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", sampler=sampler)
    output = run(a, b, "--ignore", "model", code=1)
    assert "step 2, the first, differs:" in output
    assert message in output


def test_a_shard_s_cursor_that_differs_is_named(tmp_path: Path) -> None:
    def read(folder: Path, far: int) -> Path:
        run_ = init(state={"ema": np.zeros(2)}, storage_path=folder, save_every_steps=1)
        run_.cursors("train").advance(3, far)
        run_.step_done(samples=1)
        run_.close()
        return folder

    a, b, c = (read(tmp_path / name, far) for name, far in (("a", 8), ("b", 8), ("c", 9)))
    run(a, b)
    assert "strata.cursors.train.3: [0, 8] in A, [0, 9] in B" in run(a, c, code=1)


def test_reported_numbers_are_compared_if_both_checkpoints_have_them(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in "abc"]
    reports = [{"loss": 0.5, "lr": 0.1}, {"loss": 0.75, "lr": 0.1}, None]
    for folder, report in zip(roots, reports, strict=True):
        metadata = {"strata.goodput": folder.name}
        if report is not None:
            metadata["strata.reported"] = json.dumps(report)
        with CheckpointManager(folder, capture_rng=False) as manager:
            manager.save_state({"model": np.ones(2)}, 1, metadata=metadata).wait()
    found = values(roots[0], roots[1], code=1)
    assert found["groups"]["reported"] == {"compared": 2, "different": ["strata.reported.loss"]}
    assert (found["first"]["a"], found["first"]["b"]) == ("0.5", "0.75")
    assert values(roots[0], roots[2])["groups"]["reported"]["compared"] == 0


def test_random_states_are_a_group_after_the_others_and_do_not_end_the_comparison(tmp_path: Path) -> None:
    def draw(step: int, state: dict[str, Any]) -> None:
        if step == 1:
            np.random.rand()

    def also(step: int, state: dict[str, Any]) -> None:
        draw(step, state)
        if step == 5:
            state["model"]["b"][1] = np.nan

    np.random.seed(0)
    a = train(tmp_path / "a")
    np.random.seed(0)
    b = train(tmp_path / "b", change=draw)
    output = run(a, b, code=1)
    assert "step 2, the first, differs:" in output
    assert "only random states differ; --ignore strata.rng leaves them out" in output
    assert values(a, b, code=1)["first"]["group"] == "random"
    assert run(a, b, "--ignore", "strata.rng").endswith("\nequal\n")
    np.random.seed(0)
    c = train(tmp_path / "c", change=also)
    output = run(a, c, code=1)
    assert "2 steps are equal, then step 6 differs:" in output
    assert "model.b: float32[4], 1 of 4 elements differ, by at most nan" in output
    assert "the random states differ from step 2 on" in output
    found = values(a, c, code=1)
    assert (found["random_from"], found["first"]["largest"]) == (2, "nan")


def test_a_full_an_incremental_and_a_training_that_was_restored_are_equal(tmp_path: Path) -> None:
    a = train(tmp_path / "a")
    b = train(tmp_path / "b", steps=3)
    train(b, full_every=0)
    with CheckpointManager(b) as manager:
        kinds = {c.step: c.checkpoint_type for c in manager.all_checkpoints()}
    assert CheckpointType.INCREMENTAL in kinds.values()
    output = run(a, b, "--ignore", "strata.rng")
    assert "only in B, not compared: step 3" in output
    assert output.endswith("\nequal\n")


def test_without_a_common_step_both_trainings_steps_are_named(tmp_path: Path) -> None:
    a, b = train(tmp_path / "a", steps=4), train(tmp_path / "b", steps=5, every=5)
    output = run(a, b, code=4)
    assert f"no step is committed in both: {a.as_uri()} has the steps 2, 4, {b.as_uri()} has step 5" in output
    assert "it does not exist" in run(a, tmp_path / "nothing", code=4)


def test_a_corrupt_checkpoint_is_reported_and_not_compared(tmp_path: Path) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b")
    next(b.glob("step-*4-gen-*/rank-00000.json")).write_text("{")
    output = run(a, b, "--ignore", "strata.rng")
    assert "corrupt in B, not compared: step 4" in output
    assert "only in A, not compared: step 4" in output
    assert values(a, b, "--ignore", "strata.rng")["b"] == {
        "root": b.as_uri(),
        "only": [],
        "corrupt": [4],
    }


def world(folder: Path, states: Sequence[dict[str, Any]], *, step: int = 20) -> Path:
    """Save one step by as many ranks as there are states; return the storage root."""
    ranks = Ranks(len(states))
    ranks.save(states=states, step=step)
    folder.mkdir()
    storage = LocalStorage(folder, nonce=lambda: "n")
    root.claim(storage, root.STANDALONE)
    for name, data in ranks.near.objects.items():
        storage.create_once(name.removeprefix("job/"), data)
    return folder


def states_of(
    whole: np.ndarray[Any, Any], ranks: int, *, far: int = 7, **own: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return each rank's state: its part of `whole`, an equal bias, and its own values.

    Two ranks have advanced a shard each, the last rank as far as `far`.
    """
    cursors = {0: '{"train": {"1": [0, 5]}}', ranks - 1: f'{{"train": {{"2": [0, {far}]}}}}'}
    return [
        {
            "model": {"w": part, "b": np.ones(3)},
            "strata": {
                "step": 20,
                "epoch_batches": 10 // ranks,
                "loader": {"seed": 7, "per_rank": 8 // ranks, "world_size": ranks},
                "pace": {"step_s": float(ranks)},
                "ddp": "x" * ranks,
                "cursors": cursors.get(rank, ""),
            },
            **{name: each[rank] for name, each in own.items()},
        }
        for rank, part in enumerate(divided(whole, ranks))
    ]


def test_worlds_of_2_and_3_ranks_with_the_same_whole_tensors_are_equal(tmp_path: Path) -> None:
    whole = np.arange(35, dtype=np.float32).reshape(7, 5)
    a = world(tmp_path / "a", states_of(whole, 2))
    b = world(tmp_path / "b", states_of(whole, 3))
    assert run(a, b).endswith("\nequal\n")
    whole[6, 1:3] += 1
    c = world(tmp_path / "c", states_of(whole, 3))
    output = run(a, c, code=1)
    assert "model.w: float32[7, 5], 2 of 35 elements differ, by at most 1" in output


def test_cursors_that_other_ranks_saved_are_compared_as_those_of_the_training(tmp_path: Path) -> None:
    whole = np.zeros((6, 2))
    a = world(tmp_path / "a", states_of(whole, 2))
    b = world(tmp_path / "b", states_of(whole, 3, far=8))
    assert "\nstrata.cursors.train.2: [0, 7] in A, [0, 8] in B\n" in run(a, b, code=1)


def test_each_rank_s_own_values_are_compared_where_both_worlds_have_the_rank(tmp_path: Path) -> None:
    whole = np.zeros((6, 2))
    a = world(tmp_path / "a", states_of(whole, 2, mean=[np.zeros(2), np.ones(2)]))
    b = world(tmp_path / "b", states_of(whole, 3, mean=[np.zeros(2), np.ones(2), np.full(2, 9.0)]))
    run(a, b)
    c = world(tmp_path / "c", states_of(whole, 3, mean=[np.zeros(2), np.full(2, 4.0), np.ones(2)]))
    assert "mean on rank 1: float64[2], 2 of 2 elements differ, by at most 3" in run(a, c, code=1)
    assert values(a, c, code=1)["first"]["ranks"] == [1]


def test_a_job_s_folder_in_a_root_of_coordinators_names_a_training(tmp_path: Path) -> None:
    alone, shared = train(tmp_path / "alone"), tmp_path / "shared"
    storage = LocalStorage(shared, nonce=lambda: "n")
    root.claim(storage, root.COORDINATED)
    for job in ("gpt", "bert"):
        root.claim(storage, f"{root.COORDINATED}:uid/{job}", folder=job)
        for each in train(tmp_path / job).glob("step-*"):
            each.rename(shared / job / each.name)
    assert "step 6" in run(shared / "gpt", shared / "bert", "--ignore", "strata.rng")
    assert "step 6" in run(alone, shared, "--job", "gpt", "--ignore", "strata.rng")
    assert "only of bert, gpt" in run(alone, shared, code=4)
