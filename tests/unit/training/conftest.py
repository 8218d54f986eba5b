"""Several ranks that a test plays share one process, which has no process group, whatever was imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from strata.training.group import end_group, ensure_group
from strata.training.peers import Peers


def _no_group_of_several(peers: Peers, *, arm: Callable[[], None]) -> bool:
    """Do for several ranks what is done where torch is not imported."""
    return peers.world_size == 1 and ensure_group(peers, arm=arm)


@pytest.fixture(autouse=True)
def no_group_of_several(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Initialise no process group of several ranks, though some test before may have imported torch.

    One of a single rank is taken down: a rank that was preempted leaves that to the end of its process.
    """
    monkeypatch.setattr("strata.training.beginning.ensure_group", _no_group_of_several)
    yield
    end_group()
