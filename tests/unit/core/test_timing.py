from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.timing import MIN_DETECT_S, Timing
from strata.errors import ConfigError


@given(st.floats(MIN_DETECT_S, 3600))
def test_a_frozen_host_is_found_within_detect_s(detect_s: float) -> None:
    timing = Timing.derive(detect_s)
    spent = timing.keepalive_time_s + timing.keepalive_timeout_s + timing.reconnect_grace_s
    assert spent <= detect_s + 1e-6
    assert 0 < timing.reconnect_grace_s <= 1
    assert timing.heartbeat_s * 3 < detect_s


@pytest.mark.parametrize(("detect_s", "kept_s"), [(2, 1.4), (5, 3.5), (10, 6.6), (30, 19.1)])
def test_the_documented_freeze_keeps_a_member_in_the_world(detect_s: float, kept_s: float) -> None:
    timing = Timing.derive(detect_s)
    # worst case: a ping is due at once, its timeout passes, and the member returns within the grace
    assert timing.keepalive_timeout_s + timing.reconnect_grace_s == pytest.approx(kept_s, abs=0.05)
    page = (Path(__file__).parents[3] / "docs" / "run.md").read_text()
    assert f"| {detect_s} | {kept_s} s | {detect_s} s |" in page


@pytest.mark.parametrize("detect_s", [0.0, 0.4, -1.0, 3601.0, float("nan"), float("inf")])
def test_an_impossible_detect_s_is_refused(detect_s: float) -> None:
    with pytest.raises(ConfigError, match="detect_s"):
        Timing.derive(detect_s)


def test_grpc_options_shorten_its_default_timeouts() -> None:
    assert Timing.derive().detect_s == 5.0
    server = dict(Timing.derive().server_options())
    assert server["grpc.keepalive_time_ms"] == 1500
    assert server["grpc.keepalive_timeout_ms"] == 2500
    assert server["grpc.http2.ping_timeout_ms"] == 2500
    assert server["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.http2.min_time_between_pings_ms"] < 1500
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < 1500
    client = dict(Timing.derive().client_options())
    assert client["grpc.initial_reconnect_backoff_ms"] == 100
    assert client["grpc.max_reconnect_backoff_ms"] == 2000
    assert client["grpc.keepalive_time_ms"] == server["grpc.keepalive_time_ms"]
