"""The files that ranks' output goes to: what is remembered of them, and which are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.client.inspection import RankLog
from strata.config import RunConfig
from strata.errors import ConfigError
from strata.launch.rank_logs import RankLogs


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def begun(logs: RankLogs, generation: int, rank: int) -> RankLog:
    """Begin a process that writes what it is."""
    log = logs.new(generation, rank)
    assert log is not None
    logs.begun(rank, log)
    log.file.write_text(f"rank {rank} of generation {generation}\n")
    return log


def test_of_each_rank_the_newest_two_processes_are_remembered_with_how_they_ended(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path / "job")
    for generation in (1, 2, 3):
        one = begun(logs, generation, 5)
        if generation < 3:
            logs.ended(5, one, f"exited with {generation}")
    assert [(each.generation, each.file.name, each.ended) for each in logs.of(5)] == [
        (3, "generation-000003-rank-00005.log", ""),
        (2, "generation-000002-rank-00005.log", "exited with 2"),
    ]
    assert logs.of(6) == ()


def test_a_process_that_goes_on_as_another_rank_takes_its_file_along(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path)
    one = begun(logs, 1, 0)
    logs.begun(4, one)
    logs.begun(4, one)  # in the generation after that, too
    logs.ended(4, one, "was ended by SIGKILL")
    assert [(each.generation, each.ended) for each in logs.of(4)] == [(1, "was ended by SIGKILL")]


def test_files_of_the_last_generations_stay_and_nothing_else_is_touched(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path, keep=3)
    for generation in range(1, 8):
        for rank in range(2):
            begun(logs, generation, rank)
    other = tmp_path / "generation-000001-rank-00000.log.gz"
    other.touch()
    begun(logs, 99, 0)  # left by a life of the job that counted further
    logs.remove_old(7)
    kept = [f"generation-{each:06}-rank-{rank:05}.log" for each in (5, 6, 7) for rank in range(2)]
    assert names(tmp_path) == sorted([other.name, *kept, "generation-000099-rank-00000.log"])
    logs.remove_old(7)


def test_without_a_number_to_keep_or_a_folder_nothing_is_removed(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path)
    begun(logs, 1, 0)
    logs.remove_old(1000)
    assert len(names(tmp_path)) == 1
    nowhere = RankLogs()
    assert nowhere.new(1, 0) is None
    nowhere.begun(0, None)
    nowhere.remove_old(1000)
    assert nowhere.of(0) == ()


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    RankLogs(tmp_path / "gone", keep=1).remove_old(5)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write the ranks' output"):
        RankLogs(tmp_path / "file" / "job").new(1, 0)


@pytest.mark.parametrize(("restart", "left"), [("process", 2), ("in_process", 5)])
def test_files_that_a_process_may_still_write_stay(tmp_path: Path, restart: str, left: int) -> None:
    config = RunConfig(endpoints=("c:1",), job="j", log_dir=tmp_path, log_generations=2, restart=restart)
    logs = RankLogs.of_run(config)
    for generation in range(1, 6):
        begun(logs, generation, 0)
    logs.remove_old(5)
    assert len(names(tmp_path / "j")) == left
