"""Hostile documents: strategies for JSON, TOML and endpoints, and files of other kinds in place of a document."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from strata.checkpoint.format.digest import digest, named_digest

RAW = (
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "1" * 5000,
    "1e-999999",
    "[" * 100_000,
    "[" * 380 + "]" * 380,
    '{"l":[' * 150 + "]}" * 150,
    '{"l":[' * 100_000,
    '{"a":' * 5_000 + "1" + "}" * 5_000,
    "[" + "0," * 300_000 + "0]",
    "[" + '"",' * 300_000 + "0]",
    "[" + "{}," * 300_000 + "0]",
    '"' + "\\\\" * 300_000 + '"',
    '"' + "\\ud83d\\ude00" * 10_000 + "a" * 300_000 + '"',
)
"""JSON values that `json.dumps` does not write."""
NAMES = (
    "../../../etc/passwd",
    "/etc/passwd",
    "..",
    "",
    "a/b",
    "x\0y",
    "\ud800",
    "x" * 300,
    "COMMIT",
    "manifest.json",
    "rank-00001.json",
    "rank-99999.json",
)
NUMBERS = (-1, 0, 1, 7, 2**31, 2**50, 10**12, 2**63 - 1, 2**63, 2**64, 10**400, 0.5, -0.0, 1e300)


def values() -> st.SearchStrategy[Any]:
    """Generate any value, to replace any other value."""
    scalars = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=20)
        | st.sampled_from(NUMBERS)
        | st.sampled_from(NAMES)
        | st.sampled_from(range(len(RAW))).map("@@{}@@".format)
    )
    kinds = st.sampled_from(["t", "b", "l", "u", "d", "c", "m", "f", "s", "x", "i", "e", "g", "a", "n", "?"])
    return st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(kinds | st.text(max_size=5), inner, max_size=4)
        ),
        max_leaves=8,
    )


def to_json(body: Any) -> bytes:
    """Return JSON with each "@@N@@" replaced by `RAW[N]`, so that hypothesis's examples contain no long text."""
    text = json.dumps(body)
    for number, raw in enumerate(RAW):
        text = text.replace(f'"@@{number}@@"', raw)
    return text.encode("utf-8", "replace")


def _places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(body, dict):
        for key, part in body.items():
            yield from _places(part, (*path, key))
    elif isinstance(body, list):
        for key, part in enumerate(body):
            yield from _places(part, (*path, key))


@st.composite
def changed(draw: st.DrawFn, body: Any) -> Any:
    """Generate the document `body` with one to three of its values removed, doubled or replaced."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(body))[1:]
        if not places:
            return draw(values())
        *above, last = draw(st.sampled_from(places))
        holder = body
        for key in above:
            holder = holder[key]
        match draw(st.sampled_from(["replace", "replace", "delete", "add", "twice"])):
            case "replace":
                holder[last] = draw(values())
            case "delete":
                del holder[last]
            case "add" if isinstance(holder, dict):
                holder[draw(st.text(max_size=5))] = draw(values())
            case "twice" if isinstance(holder, list):
                holder.extend(copy.deepcopy(holder[-1:]) * draw(st.integers(1, 3)))
            case _:
                holder[last] = draw(st.sampled_from(NUMBERS))
    return body


def signed(body: Any) -> Any:
    """Return the document with its own digest in the field `self`."""
    if not isinstance(body, dict):
        return body
    bare = {key: part for key, part in body.items() if key != "self"}
    return {**bare, "self": digest(json.dumps(json.loads(to_json(bare))).encode())}


def reseal(folder: Path) -> None:
    """Recompute a checkpoint's chain of digests for the files now in its folder, as an attacker could."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for part in manifest["ranks"]:
        part["digest"] = named_digest((folder / "rank-00000.json").read_bytes())
    (folder / "manifest.json").write_bytes(to_json(manifest))
    remark(folder)


def remark(folder: Path) -> None:
    """Recompute the marker's digest of the manifest."""
    marker = json.loads((folder / "COMMIT").read_bytes())
    marker["manifest_digest"] = named_digest((folder / "manifest.json").read_bytes())
    (folder / "COMMIT").write_bytes(to_json(signed(marker)))


SHAPES = ("fifo", "folder", "sparse", "huge", "zero", "loop", "socket", "empty", "proc", "random")


def put_shape(path: Path, shape: str) -> None:
    """Put a file of another kind in the place of a document."""
    path.unlink(missing_ok=True)
    match shape:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "sparse":
            path.touch()
            os.truncate(path, 8 << 30)
        case "huge":
            path.touch()
            os.truncate(path, 31 << 20)
        case "zero":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path.name)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                here = Path.cwd()
                os.chdir(path.parent)  # the path of a socket has a small length limit
                try:
                    listener.bind(path.name)
                finally:
                    os.chdir(here)
        case "empty":
            path.touch()
        case "proc":
            path.symlink_to("/proc/self/environ")
        case _:
            path.write_bytes(os.urandom(5000))


TOML = (
    "inf",
    "-inf",
    "nan",
    "1e999",
    "1e308",
    "-1",
    "true",
    "[" * 100_000,
    "[" * 300 + "]" * 300,
    "{a=" * 500 + "1" + "}" * 500,
    "0x" + "f" * 100_000,
    "9" * 5000,
    "9223372036854775808",
    '"' + "a" * 100_000 + '"',
    '"""' + "\\n" * 5000,
    "[" + '"",' * 20_000 + "]",
    '"~nobody-at-all/x"',
    '"\\u0000"',
    '"[::1"',
    '"http://u:p@h:1"',
    '"/dev/zero"',
    "2100-01-01",
    "",
    '"""a"""", ' + "[" * 1000,
)
"""TOML values, for `to_toml`."""
TOML_LINES = (
    "a." * 50_000 + "b = 1",
    "[" + "a." * 500 + "run]",
    ("[a." + "b." * 30 + "c]\n") + "".join(f"k{number} = 1\n" for number in range(9_000)),
    "".join(f"a.{'b.' * 30}k{number} = 1\n" for number in range(3_000)),
    "x = 1",
    "# [[[[",
    "[run]\n[run]",
)


def to_toml(text: str) -> bytes:
    """Return TOML with each "@@N@@" replaced by `TOML[N]`, and each "%%N%%" by `TOML_LINES[N]`."""
    for number, raw in enumerate(TOML):
        text = text.replace(f"@@{number}@@", raw)
    for number, raw in enumerate(TOML_LINES):
        text = text.replace(f"%%{number}%%", raw)
    return text.encode("utf-8", "replace")


def worst_texts(size_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield the name and text of JSON that takes the most memory or time for its size."""
    yield "one text", b'["' + b"a" * (size_bytes - 4) + b'"]'
    yield "wide text", b'["' + b"a" * (size_bytes - 16) + b'\\ud83d\\ude00"]'
    yield "wide bytes", b'["' + b"a" * (size_bytes // 4 - 8) + "😀".encode() + b'"]'
    yield "texts", b"[" + b'"aaaaaaaaaaa",' * (size_bytes // 17) + b"0]"
    yield "members", ("{" + ",".join(f'"k{i}":{i}' for i in range(990_000)) + "}").encode()
    yield "objects", b"[" + b'{"a":0},' * 660_000 + b"0]"
    yield "lists", b"[" + b"[0]," * 990_000 + b"0]"
    yield "open", b"[" * size_bytes
    yield "quotes", b'"' * size_bytes
    yield "escapes", b'"' + b'\\"' * (size_bytes // 2 - 1)
    yield "zeros", bytes(size_bytes)
