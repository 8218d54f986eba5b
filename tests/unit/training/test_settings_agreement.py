"""Settings that differ between ranks: rank 0's apply, and the difference is logged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from strata.errors import ConfigError, Refused
from strata.training.rank_context import Alone
from strata.training.save.cadence import Rule
from strata.training.settings_agreement import RankSettings, Sampling, agree_on_settings
from tests.unit.training.room import LIMIT_S, Room

MINE = RankSettings(rule=Rule(every_steps=10), sampling=Sampling(global_batch=96, seed=7))


class LiveReports(Alone):
    """One rank; a test prescribes the payloads of the others."""

    def __init__(self, rank: int, others: dict[int, bytes]) -> None:
        super().__init__(world_size=1)
        self.rank = rank
        self.others = others

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        return {self.rank: payload or b"", **self.others}


@pytest.fixture(autouse=True)
def _reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="strata.training")


def test_a_standalone_process_keeps_its_own_settings() -> None:
    assert agree_on_settings(Alone(world_size=1), MINE) == MINE


def test_ranks_with_different_settings_use_those_of_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    room = Room(3)
    wanted = [MINE, replace(MINE, rule=Rule(every_s=60.0)), replace(MINE, sampling=Sampling(seed=8))]
    got: dict[int, RankSettings] = {}

    def agree(rank: int) -> None:
        got[rank] = agree_on_settings(room.rank(rank), wanted[rank])

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert got == {0: MINE, 1: MINE, 2: MINE}
    logged = {record.message for record in caplog.records}
    assert {
        "every_steps is 0 here, and 10 on rank 0: all ranks use that of rank 0",
        "seed is 8 here, and 7 on rank 0: all ranks use that of rank 0",
        "every_steps differs between the ranks: all use rank 0's 10; other values: ranks 1",
        "global_batch differs between the ranks: all use rank 0's 96; other values: ranks 2",
    } <= logged


def test_ranks_with_equal_settings_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    room = Room(2)
    other = threading.Thread(target=agree_on_settings, args=(room.rank(1), MINE))
    other.start()
    assert agree_on_settings(room.rank(0), MINE) == MINE
    other.join(LIMIT_S)
    assert caplog.records == []


@pytest.mark.parametrize("payload", [b"", b"[]", b'{"v":2}', b'{"v":1,"every_steps":1}'])
def test_another_version_is_refused(payload: bytes) -> None:
    others: dict[int, Any] = {0: payload}
    with pytest.raises(Refused, match="rank 0"):
        agree_on_settings(LiveReports(1, others), MINE)
    with pytest.raises(Refused, match="rank 0 sent no settings"):
        agree_on_settings(LiveReports(1, {}), MINE)


def test_hosts_without_a_shared_storage_are_refused_before_the_first_step() -> None:
    room = Room(3)
    roots = [{"file:///ckpt": "a1"}, {"file:///ckpt": "a1"}, {"file:///ckpt": "b2"}]
    raised: dict[int, ConfigError] = {}

    def agree(rank: int) -> None:
        try:
            agree_on_settings(room.rank(rank), MINE, roots=roots[rank])
        except ConfigError as error:
            raised[rank] = error

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert raised.keys() == {0, 1, 2}
    for error in raised.values():
        assert error.message == "rank 2 sees another storage at file:///ckpt than rank 0 at file:///ckpt"
        assert "one storage root that they share" in (error.hint or "")


def test_a_second_storage_that_only_some_ranks_have_is_refused() -> None:
    mine = LiveReports(0, {})
    mine.others = {1: _brought({"file:///ckpt": "a1"})}
    with pytest.raises(
        ConfigError, match="rank 1 has the storages file:///ckpt, and rank 0 file:///ckpt, s3"
    ):
        agree_on_settings(mine, MINE, roots={"file:///ckpt": "a1", "s3://b/far": "c3"})


def test_one_root_by_two_paths_is_shared() -> None:
    mine = LiveReports(0, {})
    mine.others = {1: _brought({"file:///mnt/ckpt": "a1"})}
    assert agree_on_settings(mine, MINE, roots={"file:///ckpt": "a1"}) == MINE


def _brought(roots: dict[str, str]) -> bytes:
    """Return the barrier payload of a rank that sees `roots`."""
    seen: list[bytes] = []

    class Listening(Alone):
        def barrier(self, name: str, payload: bytes | None = None, **_: Any) -> dict[int, bytes]:
            seen.append(payload or b"")
            return {0: payload or b""}

    agree_on_settings(Listening(world_size=1), MINE, roots=roots)
    return seen[0]
