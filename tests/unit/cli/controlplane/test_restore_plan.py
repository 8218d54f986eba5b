"""The plan of a restore, as text and as JSON."""

from __future__ import annotations

import json

import pytest

from strata.cli.controlplane.restore_plan import as_values, lines, print_plan
from strata.core.ids import AttemptId
from strata.core.kv.records import Latest
from strata.core.restore.catalog import CatalogChanges
from strata.core.restore.control_plane import RestoredJob


def latest(step: int) -> Latest:
    return Latest(generation=1, step=step, attempt=AttemptId("a"), record_generation=1)


JOB = RestoredJob(
    name="gpt",
    generation_before=3,
    generation=5,
    latest_before=latest(120),
    latest=latest(160),
    in_base=True,
    changes=CatalogChanges(
        adopted=[(step, 4) for step in range(10, 21)],
        lost=[(5, 1)],
        corrupt=[(7, 1)],
        warnings=["step 8 is odd"],
        not_searched={"s3://b/x"},
    ),
)
NEW = RestoredJob(
    name="new",
    generation_before=0,
    generation=2,
    latest_before=None,
    latest=None,
    in_base=False,
    changes=CatalogChanges(),
)


def test_the_plan_has_a_line_for_each_thing_to_review() -> None:
    assert lines(JOB) == [
        "job gpt: steps 10, 11, 12, 13, 14, 15, 16, 17 and 3 more: committed in storage, and adopted",
        "job gpt: step 5: lost: its bytes are not in storage",
        "job gpt: step 7: kept as CORRUPT: nothing of it can be read",
        "job gpt: step 8 is odd",
        "job gpt: not searched, so taken as it was: s3://b/x (--storage)",
    ]
    (line,) = lines(NEW)
    assert "its next run brings its limits" in line


def test_a_row_shows_values_before_and_after_the_restore(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan([JOB, NEW], ["file:///x/notes is left out: \x1b[31m"], empty="it has no jobs")
    output = capsys.readouterr().out
    rows = [" ".join(row.split()) for row in output.splitlines()]
    assert "gpt 3 to 5 120 to 160 11 0 2" in rows
    assert "new - to 2 - to - 0 0 0" in rows
    assert "\x1b" not in output, "a name in storage is anybody's"
    print_plan([], [], empty="it has no jobs")
    assert capsys.readouterr().out == "it has no jobs\n"


def test_the_json_plan_has_every_slot() -> None:
    values = json.loads(json.dumps(as_values(JOB)))
    assert values["lost"] == [{"step": 5, "generation": 1}]
    assert (values["latest_before"], values["latest"], values["not_searched"]) == (120, 160, ["s3://b/x"])
