"""The agents' payloads at the join barrier, and the meeting that each agent derives from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.agent.rendezvous import Meeting
from strata.errors import ConfigError
from strata.integrations.torchrun.meeting import DEFAULT_ROLE, Met, Offer, meet

STORE = Offer(address="10.0.0.1", port=4711)


def test_one_role_is_numbered_like_the_ranks() -> None:
    payloads = {0: STORE.encode()}
    assert meet(payloads, size=8, first_rank=4, role=DEFAULT_ROLE) == Met(
        address="10.0.0.1", port=4711, role_rank=4, role_size=8
    )


def test_most_agents_of_a_large_world_bring_nothing() -> None:
    assert Offer(slots=8).encode() == b""
    assert len(STORE.encode()) <= 52, "512 KiB over 10,000 ranks"


AGENTS = st.lists(
    st.tuples(st.sampled_from([DEFAULT_ROLE, "trainer", "reader"]), st.integers(1, 4)), min_size=1, max_size=8
)


@given(AGENTS)
def test_role_ranks_are_those_that_torch_would_count(agents: list[tuple[str, int]]) -> None:
    size = sum(slots for _, slots in agents)
    payloads: dict[int, bytes] = {}
    expected: list[tuple[int, str, int, int]] = []
    first = 0
    for index, (role, slots) in enumerate(agents):
        offer = Offer(role=role, slots=slots, address="a", port=1 if index == 0 else 0)
        if payload := offer.encode():
            payloads[first] = payload
        same = [n for r, n in agents[:index] if r == role]
        expected.append((first, role, sum(same), sum(n for r, n in agents if r == role)))
        first += slots
    for first_rank, role, role_rank, role_size in expected:
        met = meet(payloads, size=size, first_rank=first_rank, role=role)
        assert (met.role_rank, met.role_size) == (role_rank, role_size)


@pytest.mark.parametrize(
    "payloads",
    [
        {},
        {0: b""},
        {0: b"hello"},
        {0: b"[]"},
        {0: b'{"torchrun":2,"address":"a","port":1}'},
        {0: b'{"torchrun":1,"address":"a","port":"x"}'},
        {0: Meeting("10.0.0.1", 4711).encode()},
        {0: STORE.encode(), 4: b'{"role":"r"}'},
        {0: STORE.encode(), 4: b"\xff"},
    ],
)
def test_payloads_of_another_program_are_refused(payloads: dict[int, bytes]) -> None:
    with pytest.raises(ConfigError):
        meet(payloads, size=8, first_rank=0, role=DEFAULT_ROLE)
