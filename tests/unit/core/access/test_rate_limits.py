"""Token buckets, and the limit on streams per holder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.access.authority import Identity, Role
from strata.core.access.rate_limits import MAX_IDENTITIES, MOST_OPEN, Buckets, Meter, Rate, Seldom
from strata.errors import QuotaExceeded

W1 = Identity(cluster="c", role=Role.MEMBER, id="w1")
W2 = Identity(cluster="c", role=Role.MEMBER, id="w2")
SLOW = Rate(per_s=10.0, burst=3.0)


@given(
    rate=st.builds(Rate, per_s=st.floats(0.5, 1000), burst=st.floats(1, 1000)),
    steps=st.lists(st.floats(0, 10), min_size=1, max_size=200),
)
def test_no_span_lets_through_more_than_its_rate_and_one_burst(rate: Rate, steps: list[float]) -> None:
    buckets: Buckets[str] = Buckets(rate)
    now, passed = 0.0, 0
    for step in steps:
        now += step
        passed += not buckets.take("w1", now)
        assert passed <= rate.burst + now * rate.per_s + 1e-6


@given(rate=st.builds(Rate, per_s=st.floats(0.5, 1000), burst=st.floats(1, 5)), now=st.floats(0, 1e6))
def test_a_caller_that_waits_the_suggested_time_is_served(rate: Rate, now: float) -> None:
    buckets: Buckets[str] = Buckets(rate)
    wait_s = 0.0
    while not wait_s:
        wait_s = buckets.take("w1", now)
    assert buckets.take("w1", now + wait_s * 1.001 + 1e-6) == 0.0


def test_a_stopped_clock_refills_no_token_bucket() -> None:
    buckets: Buckets[str] = Buckets(SLOW)
    assert [bool(buckets.take("w1", now_s)) for now_s in (5.0,) * 4] == [False, False, False, True]


def test_a_caller_over_its_rate_gets_a_retry_time_and_others_are_served() -> None:
    meter = Meter(SLOW)
    for _ in range(3):
        meter.call(W1, 0.0)
    with pytest.raises(QuotaExceeded, match="more than 10 calls a second") as raised:
        meter.call(W1, 0.0)
    assert raised.value.hint == "call again in 0.10 s"
    meter.call(W2, 0.0)
    meter.call(W1, 0.11)


def test_only_the_address_over_its_unauthenticated_rate_must_wait() -> None:
    meter = Meter(SLOW, strangers=Rate(per_s=1.0, burst=2.0))
    for _ in range(2):
        meter.stranger("ipv4:10.0.0.7", 0.0)
    with pytest.raises(QuotaExceeded, match=r"10\.0\.0\.7 by unknown callers") as raised:
        meter.stranger("ipv4:10.0.0.7", 0.0)
    assert "in 1.00 s" in raised.value.hint
    meter.stranger("ipv4:10.0.0.8", 0.0)
    meter.call(W1, 0.0)
    meter.stranger("ipv4:10.0.0.7", 1.1)


def test_frequent_events_are_logged_rarely_with_a_count() -> None:
    seldom = Seldom(1.0)
    assert [seldom.due(at_s) for at_s in (0.0, 0.1, 0.9, 1.0, 1.5, 9.0)] == [0, None, None, 2, None, 1]


@pytest.mark.parametrize("identity", [None, Identity(cluster="c", role=Role.COORDINATOR, id="c1")])
def test_coordinators_and_unauthenticated_callers_are_not_limited(identity: Identity | None) -> None:
    meter = Meter(SLOW)
    for _ in range(100):
        meter.call(identity, 0.0)
        meter.open(identity, "sessions")
    for _ in range(100):
        meter.close(identity, "sessions")


@pytest.mark.parametrize("kind", MOST_OPEN)
def test_streams_are_counted_by_identity_and_kind_and_given_back(kind: str) -> None:
    meter = Meter()
    for opened in MOST_OPEN:
        for _ in range(MOST_OPEN[opened]):
            meter.open(W1, opened)
    with pytest.raises(QuotaExceeded, match=kind):
        meter.open(W1, kind)
    meter.open(W2, kind)
    meter.close(W1, kind)
    meter.open(W1, kind)


def test_the_number_of_remembered_callers_is_bounded() -> None:
    """The least recently used bucket is dropped; its identity later begins with a full one."""
    buckets: Buckets[int] = Buckets(Rate(per_s=1.0, burst=1.0))
    for number in range(MAX_IDENTITIES):
        assert not buckets.take(number, 0.0)
    assert buckets.take(0, 0.0), "so many are remembered"
    assert not buckets.take(MAX_IDENTITIES, 0.0)
    assert buckets.take(1, 0.0)
    assert not buckets.take(0, 0.0), "and no more"
