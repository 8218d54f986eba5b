"""`strata logs`: the output shown for a folder with the files of ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import typer

from strata.cli.logs import logs
from strata.errors import ConfigError, InvalidArgument, NotFound, StrataError
from strata.launch.rank_logs import leave_link


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the output of job `gpt`, as an agent on this host wrote it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("STRATA_RUN_LOG_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "logs" / "gpt"
    made.mkdir(parents=True)
    leave_link("gpt", made, {"XDG_STATE_HOME": str(tmp_path / "state")})
    write(made, 1, 0, b"zero one\n")
    write(made, 1, 1, b"one one\n")
    write(made, 2, 1, b"a\nb\n 1%\r 2%\nlast")
    return made


def write(folder: Path, generation: int, rank: int, data: bytes) -> None:
    (folder / f"generation-{generation:06d}-rank-{rank:05d}.log").write_bytes(data)


def shown(capfdbinary: pytest.CaptureFixture[bytes], **options: object) -> bytes:
    given = {
        "rank": None,
        "follow": False,
        "lines": None,
        "generation": None,
        "prefix": None,
        "log_dir": None,
    }
    logs(**{"job_": "gpt", "config": None, **given, **options})  # type: ignore[arg-type]
    return capfdbinary.readouterr().out


@pytest.mark.usefixtures("folder")
def test_of_each_rank_the_newest_process_is_shown_with_its_rank(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    assert shown(capfdbinary) == (
        b"[rank 0] zero one\n[rank 1] a\n[rank 1] b\n[rank 1]  1%\r[rank 1]  2%\n[rank 1] last"
    )
    assert shown(capfdbinary, generation=1) == b"[rank 0] zero one\n[rank 1] one one\n"
    assert shown(capfdbinary, prefix=False, generation=1) == b"zero one\none one\n"


def test_the_newest_file_is_the_one_that_was_written_last(
    capfdbinary: pytest.CaptureFixture[bytes], folder: Path
) -> None:
    """A job that was deleted and created again counts its generations from 1."""
    for file in folder.iterdir():
        os.utime(file, (1_000_000_000, 1_000_000_000))
    write(folder, 1, 1, b"begun again\n")
    assert shown(capfdbinary) == b"[rank 0] zero one\n[rank 1] begun again\n"


@pytest.mark.usefixtures("folder")
def test_logs_of_several_generations_name_the_ranks_of_each(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    logs("gpt")
    assert capfdbinary.readouterr().err == b"generation 1: rank 0\ngeneration 2: rank 1\n"
    logs("gpt", generation=1)
    assert capfdbinary.readouterr().err == b""


def test_follow_continues_with_newly_written_lines(
    capfdbinary: pytest.CaptureFixture[bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in folder.iterdir():
        os.utime(file, (1_000_000_000, 1_000_000_000))
    written = [
        (1, b"begun again\n"),
        (3, b"three, no end"),
        (1, b"late\n"),
    ]  # each is written between two readings of the folder
    times = iter(range(1_000_000_001, 1_000_000_009))

    def pause(_seconds: float) -> None:
        if not written:
            raise KeyboardInterrupt
        generation, data = written.pop(0)
        path = folder / f"generation-{generation:06d}-rank-00001.log"
        with path.open("ab") as file:
            file.write(data)
        os.utime(path, (at := next(times), at))

    monkeypatch.setattr(time, "sleep", pause)
    with pytest.raises(typer.Exit):
        logs("gpt", rank=[1], follow=True, lines=1)
    assert capfdbinary.readouterr().out == b"last\nbegun again\nthree, no end\nlate\n"


def test_two_different_job_names_are_refused_and_the_environment_comes_last(
    capfdbinary: pytest.CaptureFixture[bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match="the argument names the job gpt, and --job names other"):
        logs("gpt", job="other")
    monkeypatch.setenv("STRATA_JOB", "other")
    assert shown(capfdbinary, rank=[0]) == b"zero one\n"
    assert shown(capfdbinary, rank=[0], job_=None, job="gpt") == b"zero one\n"
    monkeypatch.setenv("STRATA_JOB", "gpt")
    assert shown(capfdbinary, rank=[0], job_=None) == b"zero one\n"


@pytest.mark.usefixtures("folder")
def test_one_rank_is_shown_as_it_wrote(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert shown(capfdbinary, rank=[1]) == b"a\nb\n 1%\r 2%\nlast"
    assert shown(capfdbinary, rank=[0], prefix=True) == b"[rank 0] zero one\n"
    assert shown(capfdbinary, rank=[0], job="gpt", job_=None) == b"zero one\n"
    with pytest.raises(ConfigError, match="no job is named"):
        shown(capfdbinary, job_=None)


@pytest.mark.parametrize(
    ("lines", "end"), [(0, b""), (1, b"last"), (2, b" 1%\r 2%\nlast"), (99, b"a\nb\n 1%\r 2%\nlast")]
)
@pytest.mark.usefixtures("folder")
def test_the_last_lines_are_shown(capfdbinary: pytest.CaptureFixture[bytes], lines: int, end: bytes) -> None:
    assert shown(capfdbinary, rank=[1], lines=lines) == end


def test_the_folder_may_be_named(
    capfdbinary: pytest.CaptureFixture[bytes], folder: Path, tmp_path: Path
) -> None:
    moved = folder.parent.rename(tmp_path / "moved")
    with pytest.raises(NotFound, match="no ranks of job gpt have written files on this host"):
        shown(capfdbinary)
    assert shown(capfdbinary, rank=[0], log_dir=moved) == b"zero one\n"
    with pytest.raises(NotFound, match="there is no folder"):
        shown(capfdbinary, log_dir=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": [7]}, "it has ranks 0, 1"),
        ({"generation": 9}, "it has ranks 0, 1"),
        ({"job_": "other"}, "pass --log-dir DIR to strata run"),
        ({"job_": "other"}, "those of gpt have"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_missing_job_rank_or_generation_is_reported_with_the_existing_ones(
    capfdbinary: pytest.CaptureFixture[bytes], options: dict[str, object], message: str
) -> None:
    with pytest.raises(NotFound) as refused:
        shown(capfdbinary, **options)
    assert message in str(refused.value)


@pytest.mark.usefixtures("folder")
def test_a_job_name_cannot_lead_outside_the_log_folder(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with pytest.raises(StrataError) as refused:
        shown(capfdbinary, job_="../gpt")
    assert isinstance(refused.value, InvalidArgument)
