"""The OpenAPI document is the same whichever versions of msgspec and Python make it."""

from __future__ import annotations

from collections.abc import Iterator

from strata.dashboard.api.openapi import document


def descriptions(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(text := node.get("description"), str):
            yield text
        for each in node.values():
            yield from descriptions(each)
    elif isinstance(node, list):
        for each in node:
            yield from descriptions(each)


def test_no_description_keeps_the_indentation_of_its_source() -> None:
    found = list(descriptions(document()))
    assert any("\n" in text for text in found)
    assert [text for text in found if any(line.startswith(" ") for line in text.splitlines())] == []
