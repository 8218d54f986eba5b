"""The checkers' own parser of the keyspace knows every key of docs/keyspace.md."""

from __future__ import annotations

import re
from pathlib import Path

from strata_chaos.checkers.keyspace import UNKNOWN, parse_key, parse_value

PAGE = Path(__file__).parents[4] / "docs" / "keyspace.md"


def test_every_example_of_the_page_is_known() -> None:
    examples = re.findall(r"^```\n(/strata/\S+)\n(.*)\n```$", PAGE.read_text(), re.MULTILINE)
    assert len(examples) > 20
    for key, value in examples:
        assert parse_key(key).kind != UNKNOWN, key
        assert parse_value(value) is not None, key


def test_a_key_outside_of_the_keyspace_is_unknown() -> None:
    for key in (
        "/strata/v1/c/jobs/j/worlds/1/halted/2",
        "/strata/v1/c/jobs/j/histories/1",
        "/other/v1/c/uid",
    ):
        assert parse_key(key).kind == UNKNOWN, key
