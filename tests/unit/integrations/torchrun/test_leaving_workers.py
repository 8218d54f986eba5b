"""The time that leaving workers have before torchrun stops them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from strata.agent.notices import LEAVE_S
from strata.integrations.torchrun import member as module
from strata.integrations.torchrun.member import AgentMember
from strata.integrations.torchrun.session import AgentSession
from strata.v1.worlds_pb2 import STOP_ACTION_DRAIN
from strata.v1.worlds_pb2 import StopNotice as Notice
from tests.unit.integrations.torchrun.places import place, update
from tests.unit.integrations.torchrun.test_settings import settings


def test_the_grace_of_leaving_workers_starts_at_the_end_of_their_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time does not count from the previous update, which may be old: no update comes during a save."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    member = AgentMember(settings())
    session: Any = SimpleNamespace(
        error=None, workers=SimpleNamespace(supports_graceful_stop=True), world=None
    )
    member._session = cast("AgentSession", session)
    member.place = place(3)

    def receive(generation: int) -> None:
        received = update(generation)
        named = [member._settings.worker_id]
        received.notice.CopyFrom(Notice(generation=generation, action=STOP_ACTION_DRAIN, worker_ids=named))
        session.world = received
        member._leave_if_over()

    receive(3)
    assert not member.must_restart
    now[0] += 100.0
    receive(4)
    assert member.outdated
    assert not member.must_restart
    now[0] += LEAVE_S - 1
    receive(4)
    assert not member.must_restart
    now[0] += 1
    assert member.must_restart
