"""Decisions of `strata run` before it registers as a member."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.config import RunConfig
from strata.errors import ConfigError, InvalidArgument, StrataError
from strata.launch import run


async def test_a_missing_program_is_refused_before_the_agent_connects(tmp_path: Path) -> None:
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
async def test_invalid_endpoints_and_names_are_refused(config: RunConfig) -> None:
    with pytest.raises(StrataError) as refused:
        await run.run_local_agent(config, ["true"])
    assert isinstance(refused.value, ConfigError | InvalidArgument)


def test_new_and_resume_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        RunConfig(new=True, resume=True)


def test_run_logs_are_plain_text_unless_another_format_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunConfig.load(flags={}, env={}).log.format == "plain"
    assert RunConfig.load(flags={}, env={"STRATA_LOG_FORMAT": "json"}).log.format == "json"
    assert RunConfig.load(flags={"log.format": "auto"}, env={}).log.format == "auto"


def test_tee_requires_a_log_folder() -> None:
    with pytest.raises(ConfigError, match="--tee needs a folder"):
        RunConfig(tee=True)
