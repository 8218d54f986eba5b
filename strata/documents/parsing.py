"""JSON and TOML with bounded size, depth and number of values, all measured on the bytes before parsing.

Pure. Python's parsers recurse for each level, and create objects that take up to thirty times the memory of their
text. So this module first counts brackets and separators outside strings (and in TOML outside comments), which is
quicker than parsing. In an invalid document the count may mistake other text for a string, but only after the point
at which the parser raises an error. So the counts are never below the parser's.

Every fault of a document is a `ValueError`, whose text contains neither the document nor any secret in the document.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from array import array
from dataclasses import dataclass
from typing import Any, Final

MAX_DOCUMENT_BYTES: Final = 32 << 20
"""The size limit of any document in a storage root; a storage reads no more of a document than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a kind of document. `values` counts keys, members and elements at every depth."""

    size_bytes: int
    depth: int
    values: int


MANIFEST: Final = Limits(size_bytes=MAX_DOCUMENT_BYTES, depth=400, values=2_000_000)
"""A manifest. A tensor takes about 350 bytes and 24 values of a rank's manifest, so a rank may have 80,000 tensors
(for example a mixture of experts with 26,000 parameters, each with Adam's two moments). A rank takes 230 bytes and
10 values of the global manifest, which allows 140,000 ranks. A state may be nested 128 containers deep, which is
388 levels of JSON. Parsing the worst text within these limits takes 250 MB."""
LIST: Final = Limits(size_bytes=4 << 20, depth=8, values=100_000)
"""`uses.json`: a folder's name has at most 255 bytes, so the list may have more than 16,000 names."""
NOTE: Final = Limits(size_bytes=64 << 10, depth=8, values=1_000)
"""A marker, a tag, a pin, `strata.json`: half a KiB, plus the reason that a user writes for a pin."""
PLAIN: Final = Limits(size_bytes=1 << 30, depth=400, values=16_000_000)
"""A plain value that an image stores as JSON. The text is in memory already, so only the depth matters."""
HEADER: Final = Limits(size_bytes=100_000_000, depth=8, values=16_000_000)
"""The header of a safetensors file: the safetensors library accepts no larger header."""
TOKENS: Final = Limits(size_bytes=16 << 20, depth=8, values=1_000_000)
"""The file of token hashes: an entry has about 200 bytes, so the file may have 80,000 entries."""
SMALL_CONFIG: Final = Limits(size_bytes=256 << 10, depth=16, values=10_000)
"""`strata.toml`, and the file in which `strata dev` records its etcd members. All settings together take 10 KiB."""

MAX_KEY_DOTS: Final = 32
"""How many dots a line of TOML may have outside strings: the parser takes n² steps for a key of n parts."""
MAX_NUMBER: Final = 1e9
"""The largest value of a fractional setting: 31 years in seconds, which every clock can represent."""
MAX_INTEGER: Final = 2**63 - 1
MAX_UNIX_MS: Final = 253_402_300_799_999
"""The end of the year 9999, the last one that a `datetime` can represent."""

_ESCAPED_QUOTE: Final = rb"\""
_ESCAPED_BACKSLASH: Final = rb"\\"
_STRUCTURE: Final = b'[]{},:"'
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(_STRUCTURE))
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Maps opening brackets to the signed byte +1, closing ones to -1."""
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")
_TOML_TEXT: Final = re.compile(
    rb'"""(?:[^\\"]|\\.|"(?!""))*+(?:"""|\Z)"{0,2}'
    rb"|'''.*?(?:'''|\Z)'{0,2}"
    rb'|"(?:[^"\\\n]|\\.)*+(?:"|$|\Z)'
    rb"|'[^'\n]*+(?:'|$|\Z)"
    rb"|#[^\n]*+",
    re.DOTALL | re.MULTILINE,
)
"""Every kind of string, and comments; an unclosed string ends with its line or with the file."""


def json_value(data: bytes | str, limits: Limits) -> Any:
    """Return the parsed JSON value; `ValueError` if `data` is not JSON or exceeds a limit."""
    encoded = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    check_json(encoded, limits)
    text = data if isinstance(data, str) else data.decode()
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def json_object(data: bytes | str, limits: Limits) -> dict[str, Any]:
    """Return the parsed JSON object; `ValueError` if `data` is not a JSON object or exceeds a limit."""
    value = json_value(data, limits)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004  # a fault of the document, not of an argument
    return value


def check_json(data: bytes, limits: Limits) -> None:
    """Raise `ValueError` if JSON text exceeds the limits; a writer checks the documents that others must read."""
    # Strata writes ASCII. In memory, other text takes up to 4 bytes a character: as many as its widest character
    # needs.
    _check_size(len(data) * (1 if data.isascii() else 4), limits)
    if b"\\" in data:
        data = data.replace(_ESCAPED_BACKSLASH, b"").replace(_ESCAPED_QUOTE, b"")
    # Adjacent quotes may be removed anywhere: text inside a string stays inside a string.
    structure = data.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    if structure.count(b'"') > 2 * limits.values:
        raise ValueError(f"it has more than {limits.values} texts")
    structure = b"".join(structure.split(b'"')[::2])
    brackets = structure.translate(None, b",:")
    values = len(structure) - len(brackets) + brackets.count(b"[") + brackets.count(b"{")
    if values > limits.values:
        raise ValueError(f"it has more than {limits.values} values")
    _check_depth(brackets, limits)


def toml_table(data: bytes, limits: Limits) -> dict[str, Any]:
    """Return the parsed TOML table; `ValueError` if `data` is not TOML or exceeds a limit."""
    _check_size(len(data), limits)
    bare = _TOML_TEXT.sub(b"_", data)
    _check_depth(bare.translate(None, _NO_BRACKETS), limits)
    if max(line.count(b".") for line in bare.split(b"\n")) > MAX_KEY_DOTS:
        raise ValueError(f"a key has more than {MAX_KEY_DOTS} parts")
    if sum(map(bare.count, (b"=", b",", b"["))) > limits.values:
        raise ValueError(f"it has more than {limits.values} values")
    return tomllib.loads(data.decode())


def whole(value: Any, *, least: int = 0, most: int = MAX_INTEGER) -> int:
    """Return `value` if it is an integer in the range; else raise `ValueError`, also for 1.0 and true."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{shown(value)} is no whole number from {least} to {most}")
    return value


def text(value: Any) -> str:
    """Return `value` if it is a string; else raise `ValueError`."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is no text")  # noqa: TRY004  # a fault of the document
    return value


def file_name(value: Any) -> str:
    """Return `value` if it is a valid name of one of our files or folders; else, as for a path, raise `ValueError`."""
    if not isinstance(value, str) or _FILE_NAME.match(value) is None:
        raise ValueError(f"{shown(value)} is no name of a file")
    return value


def shown(value: Any) -> str:
    """Return a value's text for an error message: only its beginning or size if it is large."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to format very long integers
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        value = value[:100]
    elif isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)


def _check_size(size_bytes: int, limits: Limits) -> None:
    if size_bytes > limits.size_bytes:
        raise ValueError(f"it has {size_bytes} bytes, and at most {limits.size_bytes} are read")


def _check_depth(brackets: bytes, limits: Limits) -> None:
    if max(itertools.accumulate(array("b", brackets.translate(_STEPS))), default=0) > limits.depth:
        raise ValueError(f"it is nested more than {limits.depth} deep")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number
