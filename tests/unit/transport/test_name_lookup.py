"""Slow name lookups: the warning, and the lookup that it names."""

from __future__ import annotations

import re
import socket
import time
from typing import Any

import pytest

from strata.transport import name_lookup
from strata.transport.name_lookup import lookup_s, warn_if_slow


class LeaveRequest:
    """A name service that answers after `takes_s`, or never if `answers` is False."""

    def __init__(self, takes_s: float = 0.0, *, answers: bool = True) -> None:
        self.of: list[str] = []
        self._takes_s = takes_s
        self._answers = answers

    def __call__(self, where: tuple[Any, ...], flags: int) -> object:
        self.of.append(where[0])
        time.sleep(self._takes_s)
        if not self._answers:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return ("node-7", "discard")


@pytest.mark.parametrize(
    ("host", "requested"),
    [("10.0.0.7", "::ffff:10.0.0.7"), ("fd00::7", "fd00::7"), ("localhost", None)],
)
def test_a_lookup_requests_the_same_name_as_torch(host: str, requested: str | None) -> None:
    service = LeaveRequest()
    assert lookup_s(host, ask=service) < name_lookup.SLOW_S
    assert service.of == [requested] if requested else service.of[0] in {"::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize("answers", [True, False])
def test_a_slow_lookup_is_warned_of_with_or_without_an_answer(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_lookup, "SLOW_S", 0.05)
    messages: list[str] = []
    began = time.monotonic()
    thread = warn_if_slow("10.0.0.7", messages.append, ask=LeaveRequest(0.2, answers=answers))
    assert time.monotonic() - began < 0.2, "nobody waits for it"
    thread.join(5.0)
    (line,) = messages
    assert re.search(r"10\.0\.0\.7 took 0\.[2-9] s", line)
    assert "RES_OPTIONS" in line


def test_a_quick_lookup_gives_no_warning() -> None:
    messages: list[str] = []
    warn_if_slow("10.0.0.7", messages.append, ask=LeaveRequest(answers=False)).join(5.0)
    assert not messages
