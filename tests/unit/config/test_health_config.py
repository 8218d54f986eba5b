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
def test_an_invalid_stall_limit_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="is no limit of a phase"):
        HealthConfig(stall_limits=(entry,))


def test_the_action_on_a_stall_is_report_or_evict() -> None:
    assert HealthConfig(on_stall="evict").on_stall == "evict"
    with pytest.raises(ConfigError, match="--on-stall must be report or evict"):
        HealthConfig(on_stall="shout")
    with pytest.raises(ConfigError, match="--stall-factor"):
        HealthConfig(stall_factor=0.5)
