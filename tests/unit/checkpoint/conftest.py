from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from strata.checkpoint.catalog import SaveRequest
from strata.checkpoint.reader import Loaded, load
from strata.checkpoint.saving import Saver
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import an_info, snapshot_of
from tests.unit.checkpoint.shared_catalog import SharedCatalog


@pytest.fixture
def two_ranks() -> Callable[..., Loaded]:
    """A function that saves two ranks' states together and loads them for a third."""

    def run(*states: Any, rank: int) -> Loaded:
        storage, shared = MemoryStorage(), SharedCatalog(len(states))
        ends = []

        def one(number: int) -> None:
            saver = Saver(storage=storage, catalog=shared.of(number), commit_timeout_s=10)
            ends.append(saver.save(snapshot_of(states[number]), SaveRequest(step=20), an_info(20)))

        threads = [threading.Thread(target=one, args=(n,)) for n in range(len(states))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(ends) == len(states)
        checkpoint = ends[0]
        folder = shared.of(0).folder(checkpoint)
        return load(storage, folder, manifest_digest=checkpoint.manifest_digest, rank=rank)

    return run
