from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint.snapshot.state import MAX_DEPTH, Flat
from strata.documents.parsing import (
    MANIFEST,
    NOTE,
    SMALL_CONFIG,
    Limits,
    check_json,
    file_name,
    json_object,
    json_value,
    shown,
    toml_table,
    whole,
)

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(_json, st.booleans())
def test_json_within_the_limits_is_parsed_unchanged(value: Any, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert json_value(json.dumps(value).encode(), NOTE) == value
    exact = Limits(size_bytes=4 * len(data), depth=depth_of(value), values=1000)
    check_json(data, exact)
    if exact.depth:
        with pytest.raises(ValueError, match="nested more than"):
            check_json(data, Limits(size_bytes=4 * len(data), depth=exact.depth - 1, values=1000))


@given(st.text(alphabet='[]{}"\\,: a\n'))
def test_the_json_parser_never_nests_deeper_than_the_limit(text: str) -> None:
    """This includes invalid JSON: the parser fails before it reaches the text that the check considers a string."""
    try:
        check_json(text.encode(), Limits(size_bytes=1000, depth=2, values=1000))
    except ValueError:
        return
    deepest = 0

    def note(_pairs: Any) -> Any:
        return None

    try:
        deepest = depth_of(json.loads(text, object_hook=lambda found: found))
    except ValueError:
        return
    assert deepest <= 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 900, "nested more than 8 deep"),
        ('["' + "]" * 50 + '",' + "[" * 9 + "]" * 9 + "]", "nested more than 8 deep"),
        ("[" + "0," * 1000 + "0]", "more than 1000 values"),
        ('{"a":' * 500 + "0" + "}" * 500, "more than|nested"),
        ("[" + '"",' * 20_000 + "0]", "more than 1000"),
        ('"' + "a" * 70_000 + '"', "has 70002 bytes, and at most 65536 are read"),
        ('"' + "é" * 10_000 + '"', "at most 65536"),
        ("NaN", "NaN is no number"),
        ("-Infinity", "is no number"),
        ("1e999", "too large"),
        ("1" * 5000, "Exceeds the limit"),
        ("{", "Expecting"),
        ("\ufeff{}", "BOM|Expecting"),
    ],
)
def test_json_beyond_a_limit_is_refused_before_it_is_parsed(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        json_value(text.encode(), NOTE)


def test_brackets_and_separators_within_strings_do_not_count() -> None:
    value = {
        "text \\": '[[[[[[[[[[{{{{"\\"]' * 100,
        '"': "," * 5000,
        "\\": ["\\\\", '\\"[[[[[[[[[[', "ü" + "[" * 50],
    }
    assert json_object(json.dumps(value).encode(), NOTE) == value
    with pytest.raises(ValueError, match="no JSON object"):
        json_object(b"[]", NOTE)


def test_utf_16_is_not_guessed() -> None:
    """In UTF-16, a byte of another character may look like a bracket, and a quote may be missed."""
    with pytest.raises(ValueError, match="decode"):
        json_value("[∢]".encode("utf-16"), NOTE)


def test_the_deepest_state_that_is_saved_can_be_read() -> None:
    state: Any = 1.5
    for number in range(MAX_DEPTH):
        state = {("a", number): state}
    tree = Flat().add("", state)
    data = json.dumps({"format": "x", "tree": {"deeper": tree}}).encode()
    assert json_value(data, MANIFEST)["tree"]["deeper"] == tree


# -- TOML -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "a = [" + "[" * 14 + "]" * 14 + "]",
        'a = \'x[[[[[[[[[[[[[[[[[[[[\'\nb = "]]]\\"[[[[[[[[[[[[[[[[[[[[[["',
        'a = """\n[[[[[[[[[[[[[[[[[[[[[[ "" \\""" [ """""',
        "a = '''\n[[[[[[[[[[[[[[[[[[[[[[ '' [ '''''",
        "# [[[[[[[[[[[[[[[[[[[[[[[[[[ " + "." * 100 + "\na = 1",
        'endpoints = ["' + ".".join("abcdefgh") + '", ' + '"10.0.0.1:50051", ' * 20 + "]",
    ],
)
def test_honest_toml_is_read_as_tomllib_reads_it(text: str) -> None:
    assert toml_table(text.encode(), SMALL_CONFIG) == tomllib.loads(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = " + "[" * 100_000, "nested more than 16 deep"),
        ("a = " + "{b = " * 100 + "1" + "}" * 100, "nested"),
        ('a = """x"""", ' + "[" * 50, "nested"),
        ("a." * 50_000 + "b = 1", "more than 32 parts"),
        ("[" + "a." * 50_000 + "b]", "more than 32 parts"),
        ('"a".' * 5_000 + "b = 1", "more than 32 parts"),
        ("\n".join(f"a{n} = 1" for n in range(10_001)), "more than 10000 values"),
        ("x" * 300_000, "at most 262144 are read"),
        ("a = " + "9" * 5000, "Exceeds the limit"),
        ("a = \udcff", "decode"),
        ("a =", "Invalid value"),
    ],
)
def test_toml_beyond_a_limit_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        toml_table(text.encode("utf-8", "surrogateescape"), SMALL_CONFIG)


@given(st.text(alphabet="[]{}\"'#\\=,.a1\n ", max_size=60))
def test_the_toml_parser_never_nests_deeper_than_the_limit(text: str) -> None:
    try:
        found = toml_table(f"x = {text}".encode(), Limits(size_bytes=1000, depth=2, values=1000))
    except ValueError:
        return
    assert depth_of(found["x"]) <= 2


# -- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, True, None, "1", [], 10**400])
def test_whole_numbers_outside_of_the_range_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="no whole number"):
        whole(value)
    assert whole(2**63 - 1) == 2**63 - 1


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/x", "a/b", "x\0", "x\n", "\ud800", "x" * 256, ".hidden", None, 1]
)
def test_a_file_name_with_a_path_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="no name of a file"):
        file_name(name)
    assert file_name("rank-00000.json") == "rank-00000.json"


def test_a_value_is_shown_shortened() -> None:
    for value in ("x" * 10**6, [0] * 10**6, 10**5000, {"a": 1}, b"x" * 10**6):
        assert len(shown(value)) < 150
