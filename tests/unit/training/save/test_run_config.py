"""The hyperparameters that are kept with each checkpoint."""

from __future__ import annotations

import enum
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata
from strata.errors import InvalidArgument
from strata.training.save.run_config import changes, checked_config


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRATA_SOCKET", "STRATA_ENDPOINTS", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def trained(folder: Path, *, config: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    run = strata.init(state={"w": np.zeros(1)}, storage_path=folder, config=config)
    for _ in range(steps):
        run.step_done(samples=1)
    run.close()
    return run.config


def test_a_config_is_kept_with_the_checkpoint_until_another_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="strata.training")
    first = {"lr": 0.1, "model": {"layers": [2, 4], "act": "gelu"}, "resume": None}
    assert trained(tmp_path, config=first, steps=3) == first
    assert trained(tmp_path, config=None, steps=1) == first, "a restart without a config keeps it"
    caplog.clear()
    second = {"lr": 0.05, "model": {"layers": [2, 4], "act": "gelu"}, "wd": 0.0}
    assert trained(tmp_path, config=second, steps=1) == second
    assert (
        "the config differs from step 4's: lr is 0.05, and was 0.1; resume is absent, and was null; wd is 0.0, and was absent"
        in caplog.text
    )
    assert trained(tmp_path, config=None, steps=1) == second


def test_a_training_without_a_config_has_an_empty_one(tmp_path: Path) -> None:
    assert trained(tmp_path, config=None, steps=1) == {}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ([1], "config is a list, not a mapping"),
        ({1: 2}, "config has the key 1, which is no text"),
        ({"a": {"b": [0, np.zeros(2)]}}, r"config.a.b\[1\] is a ndarray"),
        ({"a": "x" * 70_000}, "at most 65536 are kept"),
    ],
)
def test_a_config_that_is_not_plain_is_refused(config: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        checked_config(config)


class Mode(enum.StrEnum):
    """A setting, as programs have them."""

    FAST = "fast"


class Level(enum.IntEnum):
    """Another."""

    HIGH = 3


def test_enums_and_numpy_numbers_become_plain_values(tmp_path: Path) -> None:
    given = {"mode": Mode.FAST, "level": Level.HIGH, "lr": np.float64(0.5), Mode.FAST: True}
    kept = trained(tmp_path, config=given, steps=1)
    assert kept == {"mode": "fast", "level": 3, "lr": 0.5, "fast": True}
    assert {type(value) for value in kept.values()} == {str, int, float, bool}
    assert trained(tmp_path, config=None, steps=1) == kept


def test_changes_of_nested_values_are_named() -> None:
    assert changes({"a": {"b": 1}, "c": [1]}, {"a": {"b": 2}, "c": [1]}) == ["a.b is 1, and was 2"]
    assert changes({"a": {}}, {"a": {}}) == []
