"""How long torchrun leaves workers alone that leave by themselves."""

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


def test_workers_that_leave_have_their_time_from_the_end_of_their_generation_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long ago the news before it came: a save is quiet."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    member = AgentMember(settings())
    session: Any = SimpleNamespace(
        error=None, workers=SimpleNamespace(supports_graceful_stop=True), world=None
    )
    member._session = cast("AgentSession", session)
    member.place = place(3)

    def hears(generation: int) -> None:
        told = update(generation)
        named = [member._settings.worker_id]
        told.notice.CopyFrom(Notice(generation=generation, action=STOP_ACTION_DRAIN, worker_ids=named))
        session.world = told
        member._leave_if_over()

    hears(3)
    assert not member.must_restart
    now[0] += 100.0
    hears(4)
    assert member.outdated
    assert not member.must_restart
    now[0] += LEAVE_S - 1
    hears(4)
    assert not member.must_restart
    now[0] += 1
    assert member.must_restart
