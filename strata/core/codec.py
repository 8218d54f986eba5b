"""How a record becomes a value of the keyspace and comes back: JSON, with the schema in `v`.

Unknown fields are ignored, missing ones take their default, so that replicas of neighbouring
versions read each other's records.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from strata.errors import QuotaExceeded, StrataError

SCHEMA = 1
MAX_VALUE_BYTES = 64 * 1024

R = TypeVar("R")


class PoisonRecord(StrataError):
    """A value in the keyspace is not what its key says; somebody wrote it by hand."""

    code = "POISON_RECORD"


def encode(record: Any) -> bytes:
    """Return the record as JSON; `QuotaExceeded` above `MAX_VALUE_BYTES`."""
    body = {"v": SCHEMA, **_plain(record)}
    data = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    if len(data) > MAX_VALUE_BYTES:
        raise QuotaExceeded(
            f"a {type(record).__name__} record of {len(data)} bytes is above {MAX_VALUE_BYTES}",
            hint="shorten its metadata or payload",
        )
    return data


def decode(cls: type[R], data: bytes) -> R:
    """Return the record that `data` holds; `PoisonRecord` when it is not one."""
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise TypeError(f"an object was expected, not {type(body).__name__}")
        return typing.cast(R, _build(cls, body))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PoisonRecord(f"not a {cls.__name__} record: {error}: {data[:80]!r}") from error


def b64(data: bytes) -> str:
    """Return bytes as the text that JSON can carry."""
    return base64.b64encode(data).decode("ascii")


def unb64(text: str) -> bytes:
    """Return the bytes that `b64` made `text` of."""
    return base64.b64decode(text, validate=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(hint: Any, value: Any) -> Any:
    """Return `value`, read from JSON, as an instance of the type `hint`."""
    hint = getattr(hint, "__supertype__", hint)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (inner,) = (a for a in typing.get_args(hint) if a is not type(None))
        return _build(inner, value)
    if origin is tuple:
        (item, _ellipsis) = typing.get_args(hint)
        return tuple(_build(item, v) for v in value)
    if origin is not None and issubclass(origin, Mapping):
        (_key, item) = typing.get_args(hint)
        return {k: _build(item, v) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        hints = _hints(typing.cast(Any, hint))
        return hint(**{k: _build(hints[k], v) for k, v in value.items() if k in hints})  # type: ignore[operator]  # is_dataclass narrows to an instance or a class
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if hint is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is not a {hint.__name__}")
    return value
