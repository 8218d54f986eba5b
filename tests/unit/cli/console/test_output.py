"""Output of commands: tables, JSON, sizes, ages and errors."""

from __future__ import annotations

import json

import pytest

from strata.cli.console.output import age, print_error, print_json, print_table, ranks, size
from strata.errors import StrataError, Unavailable
from strata.v1.checkpoints_pb2 import CHECKPOINT_STATE_COMMITTED, Checkpoint
from strata.v1.members_pb2 import Member
from strata.v1.worlds_pb2 import World


def test_a_table_is_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    path = "file:///" + "a" * 200
    print_table("job x", ("STEP", "PATH"), [(5, path), (100, "b")], empty="nothing")
    assert capsys.readouterr().out.splitlines() == ["job x", "STEP  PATH", f"5     {path}", "100   b"]


def test_brackets_and_colons_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("[bold]t[/bold]", ("A", "B"), [("[red]x", ":100:")], empty="nothing")
    assert capsys.readouterr().out.splitlines() == ["[bold]t[/bold]", "A       B", "[red]x  :100:"]


def test_rows_that_have_ended_are_dimmed_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("a", "train"), ("b", "done")]
    print_table("t", ("MEMBER", "PHASE"), rows, empty="", dim_from=1)
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    print_table("t", ("MEMBER", "PHASE"), rows, empty="", dim_from=1)
    shown = capsys.readouterr().out
    row, dimmed = shown.splitlines()[2:4]
    assert row.replace("\x1b[0m", "") == "a       train"
    assert dimmed.startswith("\x1b[2mb       done")
    assert shown.rstrip("\n").endswith("\x1b[0m"), "rich before 14.3 resets after the line's end"


def test_an_empty_table_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", ("A",), [], empty="no barrier [open]")
    assert capsys.readouterr().out == "no barrier [open]\n"


def test_json_has_every_field_under_the_proto_s_name(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(World(generation=3))
    document = json.loads(capsys.readouterr().out)
    assert document["generation"] == 3, "a number, though protobuf's own JSON writes text"
    assert document["forming"] is False
    assert "restore" not in document, "a message that is not there"
    print_json(Checkpoint(state=CHECKPOINT_STATE_COMMITTED, acked=[0, 1], metadata={"b": "2", "a": "1"}))
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["acked"]) == ("committed", [0, 1])
    assert list(document["metadata"].items()) == [("a", "1"), ("b", "2")]
    print_json([Member(worker_id="a"), Member()])
    assert [m["worker_id"] for m in json.loads(capsys.readouterr().out)] == ["a", ""]
    print_json([])
    assert json.loads(capsys.readouterr().out) == []


def test_an_error_goes_to_stderr_with_its_hint_on_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    message = "nobody answers at [::1]:50051, " + "long " * 60 + "ago"
    print_error(Unavailable(message, hint="start one"))
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [f"error: {message}", "hint: start one"]
    print_error(StrataError("so it is", hint=""))
    assert capsys.readouterr().err == "error: so it is\n"


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1000, "1 s"),
        (119_000, "119 s"),
        (150_000, "2 min"),
        (9_000_000, "2.5 h"),
    ],
)
def test_ages(milliseconds: int, text: str) -> None:
    assert age(milliseconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([4], "4"), ([0, 1, 2, 3, 7], "0-3, 7"), ([9, 3, 8], "3, 8-9")]
)
def test_consecutive_ranks_are_printed_as_ranges(numbers: list[int], text: str) -> None:
    assert ranks(numbers) == text
