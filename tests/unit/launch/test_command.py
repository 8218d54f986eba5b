"""The command of a run: its checks before the member registers, its comparison, and its name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from strata.config import RunConfig
from strata.core.ids import checked_id
from strata.core.members.registration import MAX_COMMAND_CHARS
from strata.errors import ConfigError
from strata.launch.command import check_command, describe, job_name
from strata.launch.run import run_local_agent


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text("")
        (tmp_path / name / "train.sh").write_text("")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    first, second = describe(one), describe(other)
    return (first.program, first.arguments_digest) == (second.program, second.arguments_digest)


def test_commands_are_compared_without_interpreter_and_path_spelling(folder: Path) -> None:
    whole = str(folder / "a" / "train.py")
    for other in (
        ("python", "a/train.py", "--lr", "1"),
        ("python3", "-u", "./b/../a/train.py", "--lr", "1"),
        (sys.executable, "-W", "error", whole, "--lr", "1"),
    ):
        assert same(("python", "a/train.py", "--lr", "1"), other)


def test_a_script_behind_a_symlink_is_the_same_program_for_any_link_target(folder: Path) -> None:
    """Kubernetes mounts a script through a link to a folder whose name differs between pods."""
    (folder / "scripts").symlink_to("a")
    before = describe(("python", "scripts/train.py"))
    (folder / "scripts").unlink()
    (folder / "scripts").symlink_to("b")
    assert describe(("python", "scripts/train.py")) == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("python", "a/train.py"), ("python", "b/train.py")),
        (("python", "a/train.py", "--lr", "1"), ("python", "a/train.py", "--lr", "2")),
        (("python", "a/train.py", "x y"), ("python", "a/train.py", "x", "y")),
        (("python", "-m", "a.train"), ("python", "-m", "b.train")),
        (("python", "-c", "1"), ("python", "-c", "2")),
        (("bash", "a/train.sh"), ("bash", "b/train.sh")),
        (("./tool",), ("tool",)),
        (("python", "a/train.py", "x" * 1000 + "1"), ("python", "a/train.py", "x" * 1000 + "2")),
    ],
)
def test_other_programs_and_arguments_are_other_commands(
    one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    assert not same(one, other)
    assert same(one, one)


def test_the_same_line_in_another_folder_is_another_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in (("python", "train.py"), ("python", "-m", "train"), ("sh", "train.sh")):
        monkeypatch.chdir(folder / "a")
        first, name = describe(line), job_name(line, host="a")
        monkeypatch.chdir(folder / "b")
        assert describe(line) != first
        assert job_name(line, host="a") != name


def test_a_shown_command_is_shell_quoted_and_of_limited_length(folder: Path) -> None:
    shown = describe(("python", "a/train.py", "--name", "two words"))
    assert (shown.program, shown.arguments) == (str(folder / "a" / "train.py"), "--name 'two words'")
    long = describe(("python", "a/train.py", "x" * 100_000, "\udcff"))
    assert len(long.arguments) < MAX_COMMAND_CHARS // 8
    assert long.SerializeToString()


@pytest.mark.parametrize(
    ("command", "stem"),
    [
        (("python", "a/train.py"), "train"),
        (("python", "-m", "a.train"), "train"),
        (("python", "-m", "nowhere.to.be.found"), "nowhere.to.be"),
        (("python", "-c", "pass"), "python"),
        (("bash", "a/train.sh", "x"), "train"),
        (("/bin/true",), "true"),
        (("./ödd näme",), "dd-n-me"),
    ],
)
def test_a_job_is_named_from_its_script(command: tuple[str, ...], stem: str) -> None:
    name = job_name(command, host="a")
    assert name.rpartition("-")[0] == stem
    assert len(name) == len(stem) + 7
    assert checked_id("job", name) == name == job_name(command, host="a")


def test_the_same_script_on_two_hosts_is_two_jobs() -> None:
    assert job_name(("python", "a/train.py"), host="a") != job_name(("python", "a/train.py"), host="b")


def test_scripts_of_one_name_get_different_jobs_and_their_arguments_do_not_count() -> None:
    assert job_name(("python", "a/train.py"), host="a") != job_name(("python", "b/train.py"), host="a")
    assert job_name(("python", "a/train.py", "--lr", "1"), host="a") == job_name(
        ("python3", "./a/train.py"), host="a"
    )
    assert job_name(("python", "-c", "1"), host="a") != job_name(("python", "-c", "2"), host="a")


@pytest.mark.parametrize("script", ["gone.py", "a", "a/train.py/x"])
def test_a_script_that_is_not_there_is_refused(script: str) -> None:
    with pytest.raises(ConfigError, match="there is no script") as refused:
        check_command((sys.executable, script, "--epochs", "3"))
    assert script in refused.value.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_script_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "a" / "train.py").chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        check_command((sys.executable, "a/train.py"))


def test_runnable_commands_are_accepted(folder: Path) -> None:
    (folder / "b" / "__main__.py").write_text("")
    lines = ["a/train.py"], ["b"], ["-c", "pass"], ["-m", "nowhere"], ["-"], ["-u", "a/train.py"]
    for line in lines:
        check_command((sys.executable, *line))
    check_command(("sh", "gone.sh"))  # the arguments of a shell are not checked


@pytest.mark.parametrize("config", [RunConfig(min_workers=2), RunConfig(max_workers=2)])
async def test_several_nodes_need_a_name(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="--job"):
        await run_local_agent(config, [sys.executable, "a/train.py"])
