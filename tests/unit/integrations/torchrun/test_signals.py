"""SIGTERM to torchrun's agent, and the call of its signal handler."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from strata.integrations.torchrun.signals import AgentSignals


@pytest.fixture
def torchs() -> Iterator[list[int]]:
    """Install a signal handler as torchrun does; yield the numbers it was called with."""
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: called.append(number))
    yield called
    signal.signal(signal.SIGTERM, before)


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_signal_requests_a_stop_and_the_second_is_torchruns(torchs: list[int]) -> None:
    requests: list[str] = []
    signals = AgentSignals(requests.append)
    signals.take()
    signals.take()
    sigterm()
    assert (requests, torchs) == (["SIGTERM"], [])
    signals.take()
    signals.give_up("nobody could be asked")
    assert torchs == [signal.SIGTERM]


def test_a_scheduler_warning_requests_a_stop_and_its_sigterm_is_no_second_signal(
    torchs: list[int],
) -> None:
    requests: list[str] = []
    signals = AgentSignals(requests.append)
    before = signal.getsignal(signal.SIGUSR1)
    signals.take()
    os.kill(os.getpid(), signal.SIGUSR1)
    sigterm()
    assert (requests, torchs) == (["SIGUSR1"], [])
    sigterm()
    assert torchs == [signal.SIGTERM], "a second one is torchrun's"
    signals.give_back()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_warning_that_reaches_no_coordinator_ends_as_sigterm_does(torchs: list[int]) -> None:
    signals = AgentSignals(lambda _name: None)
    signals.take()
    os.kill(os.getpid(), signal.SIGUSR1)
    signals.give_up("nobody could be asked")
    assert torchs == [signal.SIGTERM]
    signals.give_back()


def test_signal_handlers_are_restored_after_a_generation(torchs: list[int]) -> None:
    requests: list[str] = []
    signals = AgentSignals(requests.append)
    signals.take()
    sigterm()
    signals.give_back()
    sigterm()
    assert (requests, torchs) == (["SIGTERM"], [signal.SIGTERM])
    signals.take()
    sigterm()
    assert requests == ["SIGTERM", "SIGTERM"]
    signals.give_back()


def test_a_handler_that_torchrun_sets_again_is_found_again(torchs: list[int]) -> None:
    requests: list[str] = []
    signals = AgentSignals(requests.append)
    signals.take()
    later: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: later.append(number))
    signals.take()
    sigterm()
    sigterm()
    assert (requests, torchs, later) == (["SIGTERM"], [], [signal.SIGTERM])


def test_a_signal_that_torchrun_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        signals = AgentSignals(lambda _name: None)
        signals.take()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_signal_handler_is_installed_outside_of_the_main_thread(torchs: list[int]) -> None:
    now = signal.getsignal(signal.SIGTERM)
    signals = AgentSignals(lambda _name: None)
    other = threading.Thread(target=signals.take)
    other.start()
    other.join()
    signals.give_back()
    assert signal.getsignal(signal.SIGTERM) is now
