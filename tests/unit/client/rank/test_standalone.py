"""The errors of a standalone process that cannot start an agent."""

from __future__ import annotations

import socket
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
def test_a_process_that_cannot_start_an_agent_raises_a_config_error(
    name: str, value: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    with pytest.raises(ConfigError, match=why) as raised:
        standalone.spawned()
    assert "strata run" in raised.value.hint


async def test_the_agent_is_started_once_and_before_the_dial_whose_time_the_session_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the start of a process takes longer than a dial may take."""
    started: list[socket.socket] = []
    start = standalone.spawned

    def counted() -> socket.socket:
        started.append(start())
        return started[-1]

    monkeypatch.setattr(standalone, "spawned", counted)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    dial = standalone.own_agent(standalone.start_of(["127.0.0.1:1"], 5.0, Credentials()))
    assert len(started) == 1
    async with dial(Endpoint(path="agent")):
        assert len(started) == 1


async def test_an_ended_agent_is_not_restarted_and_its_error_is_raised(
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
