"""What ends an agent's session under torchrun."""

from __future__ import annotations

import asyncio

import pytest

from strata.client.member import MemberSession
from strata.integrations.torchrun.session import AgentSession
from tests.unit.integrations.torchrun.test_settings import settings

LIMIT_S = 10.0


async def test_an_error_that_is_none_of_strata_s_ends_the_agent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was dropped: the agent waited for a world for ever."""

    async def run(_self: MemberSession) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(MemberSession, "run", run)
    session = AgentSession(settings(), on_change=lambda: None)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(session.run(), LIMIT_S)
    assert isinstance(session.error, ZeroDivisionError)
