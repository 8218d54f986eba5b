"""What a save's handle tells those who wait for it."""

from __future__ import annotations

import pytest

from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import an_info, local_catalog, save


def test_a_save_is_committed_whatever_one_that_hears_of_it_raises(caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()
    record = save(storage, local_catalog(storage), {"a": 1}, 7)
    info = an_info(7)
    heard: list[bool] = []

    def broken() -> None:
        raise ZeroDivisionError("of who hears it")

    info.on_commit(broken)
    info.on_commit(lambda: heard.append(info.committed))
    info.succeed(record)
    assert info.wait(0).committed
    assert heard == [False], "before anybody sees it, and although the first one failed"
    assert "of who hears it" in caplog.text
