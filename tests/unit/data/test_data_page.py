"""docs/data.md: its test vectors, and the program it prints."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from strata.data.sampler import ElasticSampler

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()


def block(language: str, word: str) -> str:
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = [each for each in blocks if word in each]
    return found


def printed() -> Any:
    names: dict[str, Any] = {}
    exec(compile(block("python", "def samples"), "docs/data.md", "exec"), names)
    return names["samples"]


def shipped(vector: dict[str, Any], rank: int) -> list[list[list[int]]]:
    """Return the pieces of each remaining step."""
    sampler = ElasticSampler(
        vector["length"],
        global_batch=vector["global_batch"],
        most=vector["most"],
        seed=vector["seed"],
        shuffle=vector["order"] == "order-v1",
    )
    order, steps, pieces = sampler.order(vector["epoch"]), [], []
    for piece in sampler.pieces(rank, vector["world"], done=vector["cursor"]):
        pieces.append(order.take(piece.begin, piece.end))
        if piece.last:
            steps.append(pieces)
            pieces = []
        if len(steps) == 2:
            break
    return steps


def test_the_page_vectors_are_correct() -> None:
    vectors = json.loads(block("json", "order"))
    assert len(vectors) >= 8
    assert {vector["order"] for vector in vectors} == {"order-v1", "sequential"}
    for vector in vectors:
        expected = vector.pop("samples")
        assert [shipped(vector, rank) for rank in range(vector["world"])] == expected, vector
        assert [
            list(islice(printed()(**vector, rank=rank), 2)) for rank in range(vector["world"])
        ] == expected


@given(
    length=st.integers(1, 300),
    global_batch=st.integers(1, 40),
    most=st.one_of(st.none(), st.integers(1, 9)),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 99),
    batches=st.integers(0, 9),
    data=st.data(),
)
def test_the_printed_program_computes_the_same(data: st.DataObject, batches: int, **vector: Any) -> None:
    vector["cursor"] = min(batches * vector["global_batch"], vector["length"])
    vector["world"] = data.draw(st.integers(1, vector["global_batch"]))
    vector["order"] = data.draw(st.sampled_from(["order-v1", "sequential"]))
    rank = data.draw(st.integers(0, vector["world"] - 1))
    assert list(islice(printed()(**vector, rank=rank), 2)) == shipped(vector, rank)
