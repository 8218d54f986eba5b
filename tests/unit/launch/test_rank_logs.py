"""The files with ranks' output: their records, and the removal of old ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strata.client.rank.inspection import RankLog
from strata.errors import ConfigError
from strata.launch.rank_logs import RankLogs, files_in, leave_link, link_of, newest


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def begun(logs: RankLogs, generation: int, rank: int) -> RankLog:
    """Open the log of a new process of a rank, and write the rank and its generation to the log."""
    log = logs.new(generation, rank)
    assert log is not None
    logs.begun(rank, log)
    log.file.write_text(f"rank {rank} of generation {generation}\n")
    return log


def test_the_newest_two_processes_of_each_rank_are_kept_with_their_ends(tmp_path: Path) -> None:
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


def test_the_log_file_of_a_new_process_is_newest_before_its_first_write(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path)
    for generation in (1, 7):
        log = begun(logs, generation, 0)
        os.utime(log.file, (generation, generation))
    assert newest(files_in(tmp_path))[0].generation == 7
    logs.new(1, 0)  # the job was deleted and created again
    assert newest(files_in(tmp_path))[0].generation == 1


def test_a_process_that_continues_as_another_rank_keeps_its_log_file(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path)
    one = begun(logs, 1, 0)
    logs.begun(4, one)
    logs.begun(4, one)  # and in the generation after that
    logs.ended(4, one, "was ended by SIGKILL")
    assert [(each.generation, each.ended) for each in logs.of(4)] == [(1, "was ended by SIGKILL")]


def test_without_a_folder_there_are_no_files(tmp_path: Path) -> None:
    nowhere = RankLogs()
    assert nowhere.new(1, 0) is None
    nowhere.begun(0, None)
    assert nowhere.of(0) == ()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write the ranks' output"):
        RankLogs(tmp_path / "file" / "job").new(1, 0)


def test_an_agent_leaves_a_link_to_the_newest_folder_of_a_job_and_its_files_are_found(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        leave_link("job", tmp_path / name, env)
    assert link_of("job", env).resolve() == tmp_path / "new"
    assert link_of("job", {"HOME": "/home/u"}).is_relative_to("/home/u/.local/state/strata/logs")
    for stem in (
        "generation-000001-rank-00000",
        "generation-000002-rank-00000",
        "generation-1000000-rank-00010",
    ):
        (tmp_path / "new" / f"{stem}.log").touch()
    (tmp_path / "new" / "notes.txt").touch()
    files = files_in(link_of("job", env))
    assert [(each.rank, each.generation) for each in files] == [(0, 1), (0, 2), (10, 1_000_000)]
    assert [(each.rank, each.generation) for each in newest(files).values()] == [(0, 2), (10, 1_000_000)]
    assert files_in(tmp_path / "nowhere") == []


def test_a_failure_to_link_the_log_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    leave_link("job", tmp_path, {"XDG_STATE_HOME": str(tmp_path / "file")})
