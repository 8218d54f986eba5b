"""docs/ring.md: its test vectors, and the program it prints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata.core.datasets.assignment import divided, owners_of
from strata.core.datasets.ring import POINTS, position
from strata.core.ids import WorkerId
from strata.core.kv.records import Assignment

PAGE = (Path(__file__).parents[4] / "docs" / "ring.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def printed_program() -> Callable[..., list[str]]:
    """Return the function that the page prints."""
    (program,) = blocks("python")
    names: dict[str, Any] = {}
    exec(compile(program, "docs/ring.md", "exec"), names)
    owners: Callable[..., list[str]] = names["owners"]
    return owners


def test_the_page_vectors_of_positions_are_correct() -> None:
    vectors = json.loads(blocks("json")[0])
    assert len(vectors) >= 5
    for vector in vectors:
        assert position(vector["text"]) == vector["position"], vector


def assignment(vector: dict[str, Any]) -> Assignment:
    return Assignment(
        assign_epoch=1,
        epoch=1,
        generation=1,
        shards=vector["shards"],
        workers=tuple(vector["workers"]),
        seats=vector["seats"],
        moved={worker: tuple(taken) for worker, taken in vector["moved"].items()},
    )


def test_the_page_vectors_of_owners_are_correct() -> None:
    vectors = json.loads(blocks("json")[1])
    assert any(vector["moved"] for vector in vectors)
    assert any(vector["seats"] for vector in vectors)
    for vector in vectors:
        assert owners_of(assignment(vector)) == vector["owners"]


def test_the_leader_makes_the_assignments_of_the_page() -> None:
    made: Assignment | None = None
    for vector in json.loads(blocks("json")[1]):
        old = made if made is not None and made.shards == vector["shards"] else None
        made = divided(tuple(vector["workers"]), vector["shards"], old, epoch=1, generation=1)
        expected = assignment(vector)
        assert (made.workers, made.seats, made.moved) == (expected.workers, expected.seats, expected.moved)


def test_the_printed_program_computes_the_same() -> None:
    printed = printed_program()
    made = None
    for first in range(4):
        workers = tuple(WorkerId(f"node-{index}") for index in range(first, first + 20 + first % 2))
        made = divided(workers, 700, made, epoch=1, generation=1)
        assert made.moved
        assert bool(made.seats) == (first > 0)
        assert printed(made.workers, 700, made.seats, made.moved) == owners_of(made)


def test_the_page_names_the_number_of_points() -> None:
    assert f"has {POINTS} points" in PAGE
