"""The settings of `strata run` for stalled ranks."""

from __future__ import annotations

import pytest

from strata.config import HealthConfig, RunConfig, load
from strata.errors import ConfigError


def test_limits_are_read_by_phase() -> None:
    config = load(RunConfig, env={"STRATA_RUN_STALL_LIMITS": "step=60, Eval = 900.5"})
    assert config.health.phase_limits_s() == {"step": 60.0, "eval": 900.5}
    assert load(RunConfig).health.phase_limits_s() == {}


@pytest.mark.parametrize(
    "entry", ["step", "step=", "=5", "step=soon", "step=0", "step=-1", "step=nan", "step=inf"]
)
def test_what_is_no_limit_is_named(entry: str) -> None:
    with pytest.raises(ConfigError, match="is no limit of a phase"):
        HealthConfig(stall_limits=(entry,))


def test_there_are_two_things_to_do_about_a_stall() -> None:
    assert HealthConfig(on_stall="evict").on_stall == "evict"
    with pytest.raises(ConfigError, match="--on-stall must be report or evict"):
        HealthConfig(on_stall="shout")
    with pytest.raises(ConfigError, match="--stall-factor"):
        HealthConfig(stall_factor=0.5)
