"""Conversion of callers' arguments into protocol values; `InvalidArgument` with a hint for invalid ones."""

from __future__ import annotations

import operator
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Final

from strata.core.spans import seconds, timeout
from strata.errors import InvalidArgument

__all__ = [
    "barrier_name",
    "integer",
    "metadata",
    "payload",
    "phase",
    "ranks",
    "seconds",
    "text",
    "texts",
    "timeout",
]

MAX_PHASE_CHARS: Final = 200

_UNPRINTED: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control and format characters, lone surrogates, line and paragraph separators."""


def integer(what: str, value: object, *, below: int, hint: str = "pass a whole number") -> int:
    """Return `value`, possibly one of NumPy's integers, as a plain integer from 0 to `below` - 1."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # a value without __index__ raises the TypeError
    except TypeError:
        raise InvalidArgument(f"{what} is {_shown(value)}, not a number from 0 on", hint=hint) from None
    if isinstance(value, bool) or not 0 <= number < below:
        raise InvalidArgument(f"{what} {_shown(value)} is not a number from 0 to {below - 1}", hint=hint)
    return number


def text(what: str, value: object) -> str:
    """Return `value` if it is text that can be encoded."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} is {_shown(value)}, not text", hint='pass a str, such as "w0"')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"{what} is {_shown(value)}, which is no Unicode text", hint="it was decoded from other bytes"
        ) from None
    return value


def texts(what: str, value: object) -> tuple[str, ...]:
    """Return several texts, unchanged, as a tuple."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidArgument(
            f"{what} is {_shown(value)}, not a list of texts", hint='pass a list such as ["gpu-0"]'
        )
    return tuple(text(f"one of {what}", one) for one in value)


def metadata(value: object) -> dict[str, str]:
    """Return metadata, a mapping of text to text; empty for None."""
    if value is None:
        return {}
    hint = 'pass {"note": "…"}; turn numbers into text first'
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"metadata is {_shown(value)}, and maps text to text", hint=hint)
    for item in value.items():
        for part in item:
            if not isinstance(part, str):
                raise InvalidArgument(f"metadata maps text to text, and {_shown(part)} is none", hint=hint)
            text("metadata", part)
    return dict(value)


def barrier_name(value: object) -> str:
    """Return the name of a barrier if it is a line of text; the coordinator validates the name's form."""
    if not isinstance(value, str) or not value.isprintable():
        raise InvalidArgument(
            f"a barrier's name is {_shown(value)}, not a line of text", hint='such as "ready"'
        )
    return value


def payload(value: object) -> bytes:
    """Return a rank's barrier payload; empty for None."""
    if value is None:
        return b""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidArgument(
            f"a payload is bytes, not {type(value).__name__}", hint='encode text first: text.encode("utf-8")'
        )
    return bytes(value)


def ranks(value: object, world_size: int) -> tuple[int, ...]:
    """Return ranks of a world, sorted and without duplicates; empty for None."""
    if value is None:
        return ()
    hint = f"pass a list of ranks from 0 to {world_size - 1}, such as [0, 1]"
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidArgument(f"ranks is {_shown(value)}, not a list of numbers", hint=hint)
    return tuple(sorted({integer("a rank", one, below=world_size, hint=hint) for one in value}))


def phase(value: object) -> str:
    """Return a phase for display: one line of at most 200 characters."""
    if not isinstance(value, str):
        raise InvalidArgument(f"a phase is text, not {type(value).__name__}", hint='such as "evaluate"')
    cut = value[:MAX_PHASE_CHARS]
    if cut.isprintable():
        return cut
    return "".join("?" if unicodedata.category(c) in _UNPRINTED else c for c in cut)


def _shown(value: object) -> str:
    text = "a number too large" if isinstance(value, int) and value.bit_length() > 256 else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
