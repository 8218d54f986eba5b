"""docs/ring.md: its test vectors, and the program it prints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata.core.ring import POINTS, assign, homes, owners, position

PAGE = (Path(__file__).parents[3] / "docs" / "ring.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_positions() -> None:
    vectors = json.loads(blocks("json")[0])
    assert len(vectors) >= 5
    for vector in vectors:
        assert position(vector["text"]) == vector["position"], vector


def test_owners() -> None:
    vectors = json.loads(blocks("json")[1])
    assert any(vector["moved"] for vector in vectors)
    for vector in vectors:
        workers, shards = vector["workers"], vector["shards"]
        assert homes(workers, shards) == vector["homes"]
        assert assign(workers, shards) == vector["moved"]
        assert owners(workers, shards, vector["moved"]) == vector["owners"]


def test_the_printed_program_computes_the_same() -> None:
    (program,) = blocks("python")
    names: dict[str, Any] = {}
    exec(compile(program, "docs/ring.md", "exec"), names)
    printed: Callable[..., list[str]] = names["owners"]
    workers = [f"node-{index}" for index in range(23)]
    moved = assign(workers, 700)
    assert moved
    assert printed(workers, 700, moved) == owners(workers, 700, moved)


def test_the_page_names_the_number_of_points() -> None:
    assert f"has {POINTS} points" in PAGE
