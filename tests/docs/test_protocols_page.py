"""docs/protocols.md has every rule under its stable number, and citations name existing rules."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "protocols.md"

RULES_OF_SECTION = {2: 6, 3: 7, 4: 9, 5: 8, 6: 6, 7: 3, 8: 10, 9: 4}
RULES = [f"{s}.{n}" for s, count in RULES_OF_SECTION.items() for n in range(1, count + 1)]

CITATION = re.compile(r"PROTOCOLS (\d+\.\d+)|protocol rule (\d+\.\d+)|\brule (\d\.\d+)\b")


def test_the_rules_are_numbered_in_order() -> None:
    text = PAGE.read_text()
    assert re.findall(r"^## (\d+)\. ", text, re.MULTILINE) == [str(n) for n in range(1, 10)]
    assert re.findall(r"^### (\d+\.\d+) ", text, re.MULTILINE) == RULES


def test_every_rule_has_text() -> None:
    bodies = re.split(r"^#{2,3} .*$", PAGE.read_text(), flags=re.MULTILINE)
    titles = re.findall(r"^#{2,3} (.*)$", PAGE.read_text(), re.MULTILINE)
    empty = [title for title, body in zip(titles, bodies[1:], strict=True) if not body.strip()]
    # a section's body is its rules; the title of 2.6 states its rule
    assert [title for title in empty if not re.match(r"\d\. |2\.6 ", title)] == []


def test_citations_in_the_code_name_rules_that_exist() -> None:
    unknown = []
    for folder in ("strata", "tests", "benchmarks", "examples", "proto", "docs"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix not in {".py", ".proto", ".md"} or file.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            for match in CITATION.finditer(file.read_text()):
                cited = next(group for group in match.groups() if group)
                if cited not in RULES:
                    unknown.append(f"{file.relative_to(ROOT)}: {match.group()}")
    assert unknown == []


def test_decisions_are_listed() -> None:
    folder = ROOT / "docs" / "adr"
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text())
    assert listed == sorted(path.name for path in folder.glob("[0-9]*.md"))
