"""The end of an agent's session under torchrun."""

from __future__ import annotations

import asyncio

import pytest

from strata.client.member_session import MemberSession
from strata.errors import ClusterRestored
from strata.integrations.torchrun.session import AgentSession
from strata.v1.session_pb2 import Welcome
from tests.unit.integrations.torchrun.test_settings import settings

LIMIT_S = 10.0


async def test_a_foreign_exception_also_ends_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the agent would wait for a world for ever."""

    async def run(_self: MemberSession) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(MemberSession, "run", run)
    session = AgentSession(settings(), on_change=lambda: None)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(session.run(), LIMIT_S)
    assert isinstance(session.error, ZeroDivisionError)


async def test_the_socket_of_workers_stays_after_a_restore_until_they_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restored = ClusterRestored("the control plane was restored")
    over = asyncio.Event()

    async def connected(self: MemberSession) -> None:
        self.welcome = Welcome(detect_s=2.0)

    async def run(self: MemberSession) -> None:
        await over.wait()
        self.error = restored
        raise restored

    monkeypatch.setattr(MemberSession, "wait_connected", connected)
    monkeypatch.setattr(MemberSession, "run", run)
    session = AgentSession(settings(), on_change=lambda: None)
    running = asyncio.create_task(session.run())
    assert await session.comes_true(lambda: session.open, LIMIT_S)
    socket = session.agent.socket
    over.set()
    assert await session.comes_true(lambda: session.error is restored, LIMIT_S)
    assert socket.is_socket()
    assert not running.done()
    session.release()
    with pytest.raises(ClusterRestored):
        await asyncio.wait_for(running, LIMIT_S)
    assert not socket.exists()
