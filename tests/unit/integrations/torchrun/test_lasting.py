from __future__ import annotations

from collections.abc import Callable

import pytest

from strata.integrations.torchrun.workers import Workers


@pytest.mark.parametrize("goes_on", [Workers.rank_attached, Workers.rank_stepped, Workers.rank_stopped])
def test_a_worker_that_continues_withdraws_its_permanent_failure(
    goes_on: Callable[[Workers, int, int], None],
) -> None:
    workers = Workers()
    workers.rank_cannot_go_on(0, 1, "CheckpointError: it does not fit")
    workers.rank_cannot_go_on(1, 1, "CheckpointError: it does not fit")
    goes_on(workers, 0, 1)
    assert workers.lasting == {1: "CheckpointError: it does not fit"}
