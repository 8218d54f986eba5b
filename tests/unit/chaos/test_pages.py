"""The pages of docs/chaos agree with the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from strata_chaos.checkers import ALL
from strata_chaos.history import Record, decode, encode

DOCS = Path(__file__).resolve().parents[3] / "docs" / "chaos"
SOURCES = Path(__file__).resolve().parents[3] / "chaos" / "strata_chaos"


def test_the_table_of_rules_matches_the_code() -> None:
    rows = re.findall(r"^\| `(\w+/[\w-]+)` \| (.+) \|$", (DOCS / "checkers.md").read_text(), re.MULTILINE)
    rules = [
        (f"{checker.findings.checker}/{rule}", promise)
        for checker in (make() for make in ALL)
        for rule, promise in checker.findings.rules.items()
    ]
    assert rows == rules


def test_the_example_line_is_a_valid_record() -> None:
    line = re.search(r"^\{.*\}$", (DOCS / "history.md").read_text(), re.MULTILINE)
    assert line is not None
    record = decode(line.group())
    assert decode(encode(record)) == record


def test_every_field_of_a_line_is_on_the_page() -> None:
    page = (DOCS / "history.md").read_text()
    fields = {field.name for field in dataclasses.fields(Record)} - {"where"}
    assert all(re.search(rf"^\| .*`{name}`", page, re.MULTILINE) for name in (*fields, "v"))


def test_every_operation_that_is_recorded_is_on_the_page() -> None:
    page = (DOCS / "history.md").read_text()
    files = [SOURCES / "observer.py", *(SOURCES / "workloads").glob("*.py")]
    pattern = re.compile(r'(?:operation|note|_line|_note)\(\s*"([a-z]+(?:\.[a-z_]+)?)"')
    found = {op for file in files for op in pattern.findall(file.read_text())}
    assert len(found) > 20
    assert not {op for op in found if f"`{op}`" not in page}
