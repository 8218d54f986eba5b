"""A torchrun agent joins again as another member after a restore of its control plane."""

from __future__ import annotations

import importlib
import itertools
import time
from typing import Any

import pytest

from strata.errors import ClusterRestored
from tests.unit.integrations.torchrun.test_settings import settings

pytest.importorskip("torch")

RESTORED = ClusterRestored("the control plane was restored")


class Member:
    """An agent's member in a restored control plane; only the third such member can join."""

    made: list[Member]

    def __init__(self, _settings: object) -> None:
        self.failure: Any = None
        self.released = False
        self.left = False
        self.number = len(self.made)
        self.made.append(self)

    async def run(self) -> None:
        pass

    async def join(self, failure: Any, _open_store: object) -> str:
        self.failure = failure
        if self.number < 2:
            raise RESTORED
        return "a place"

    def release(self) -> None:
        self.released = True

    async def leave(self) -> None:
        self.left = True


def test_an_agent_joins_as_a_new_member_until_one_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    from strata.client.event_loop import BackgroundLoop  # noqa: PLC0415

    handler = importlib.import_module(
        "strata.integrations.torchrun.handler"
    )  # the package has a function of the same name
    Member.made = []
    background = BackgroundLoop()
    pauses: list[float] = []
    monkeypatch.setattr(handler, "AgentMember", Member)
    monkeypatch.setattr(handler.event_loop, "shared", lambda: background)
    monkeypatch.setattr(time, "sleep", pauses.append)
    rendezvous = handler.StrataRendezvous(settings())
    rendezvous._run_member()
    assert rendezvous._join(None) == "a place"
    background.stop()
    assert [one.released for one in Member.made] == [True, True, False]
    assert [one.left for one in Member.made] == [False, False, True], "the last one leaves at the end"
    assert pauses == [0.0, 1.0]


def test_an_agent_that_is_refused_again_and_again_waits_longer_each_time() -> None:
    from strata.integrations.torchrun.handler import growing_pauses  # noqa: PLC0415

    assert list(itertools.islice(growing_pauses(), 8)) == [0, 1, 2, 4, 8, 16, 30, 30]


async def test_a_member_whose_control_plane_was_restored_restarts_its_workers_and_is_not_closed() -> None:
    from strata.integrations.torchrun.member import AgentMember  # noqa: PLC0415

    member = AgentMember(settings())
    member._session.upward.error = RESTORED
    assert member.must_restart
    assert not member.closed
