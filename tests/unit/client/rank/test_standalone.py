"""The errors of a standalone process that cannot start an agent."""

from __future__ import annotations

import sys

import pytest

from strata.client.rank import standalone
from strata.config import Credentials
from strata.errors import ConfigError, StaleIncarnation, TransportBroken
from strata.session.endpoints import Endpoint


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("executable", "", "names no interpreter"),
        ("executable", "/no/python", "No such file"),
        ("frozen", True, "names no interpreter"),
    ],
)
def test_where_no_agent_can_be_started_it_says_so(
    name: str, value: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    with pytest.raises(ConfigError, match=why) as raised:
        standalone.spawned()
    assert "strata run" in raised.value.hint


async def test_an_agent_that_has_ended_is_not_started_again_and_why_it_ended_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    dial = standalone.own_agent(standalone.start_of(["127.0.0.1:1"], 5.0, Credentials()))
    with pytest.raises(TransportBroken) as broken:
        async with dial(Endpoint(path="agent")) as link:
            await link.recv()
    with pytest.raises(StaleIncarnation, match=broken.value.message) as raised:
        async with dial(Endpoint(path="agent")):
            pass
    assert "strata run" in raised.value.hint
