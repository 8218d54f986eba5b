"""What a rank's log says of its connection: each kind of trouble once, not once a try or endpoint."""

from __future__ import annotations

import logging

import pytest

from strata.client.seat import Watcher
from strata.errors import Unauthenticated, Unavailable
from strata.v1.session_pb2 import Welcome


def test_tries_at_several_endpoints_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    watcher = Watcher()
    with caplog.at_level(logging.WARNING, logger="strata.client"):
        for _ in range(3):
            for endpoint in ("a:1", "b:2", "c:3"):
                watcher.on_disconnected(Unavailable(f"{endpoint}: connection refused"))
        assert len(caplog.records) == 1
        watcher.on_disconnected(Unauthenticated("the token was revoked"))
        assert len(caplog.records) == 2, "another kind of trouble is news"
        watcher.on_connected(Welcome(replica="r1"))
        assert "connected again" in caplog.records[-1].getMessage()
        watcher.on_disconnected(Unavailable("a:1: connection refused"))
        assert len(caplog.records) == 4, "a new outage is told anew"
