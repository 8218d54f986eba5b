"""Decisions of `strata run` before it registers as a member."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.config import RunConfig
from strata.errors import ConfigError, InvalidArgument, StrataError
from strata.launch import run


async def test_a_program_that_is_not_there_is_refused_before_anybody_waits(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n")
    for command in ("no-such-program", str(script)):
        with pytest.raises(ConfigError, match="no program"):
            await run.run_local_agent(RunConfig(), [command])


@pytest.mark.parametrize(
    "config",
    [RunConfig(endpoints=("a:b",)), RunConfig(job="../x"), RunConfig(worker_id="two words")],
    ids=["endpoints", "job", "worker"],
)
async def test_names_that_no_cluster_knows_are_refused(config: RunConfig) -> None:
    with pytest.raises(StrataError) as refused:
        await run.run_local_agent(config, ["true"])
    assert isinstance(refused.value, ConfigError | InvalidArgument)


def test_a_job_goes_on_or_begins_anew_and_not_both() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        RunConfig(new=True, resume=True)


def test_logs_stand_between_ranks_lines_as_plain_text_unless_somebody_asks_for_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunConfig.load(flags={}, env={}).log.format == "plain"
    assert RunConfig.load(flags={}, env={"STRATA_LOG_FORMAT": "json"}).log.format == "json"
    assert RunConfig.load(flags={"log.format": "auto"}, env={}).log.format == "auto"


def test_a_second_place_for_output_needs_a_first() -> None:
    with pytest.raises(ConfigError, match="--tee needs a folder"):
        RunConfig(tee=True)
