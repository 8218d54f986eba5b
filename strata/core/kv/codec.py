"""How a record becomes a value of the keyspace and comes back: JSON, with the schema in `v`.

Unknown fields are ignored, missing ones take their default, so that replicas of neighbouring
versions read each other's records.
"""

from __future__ import annotations

import base64
from typing import Any, TypeVar

import msgspec

from strata.errors import QuotaExceeded, StrataError

SCHEMA = 1
MAX_VALUE_BYTES = 64 * 1024

R = TypeVar("R")


class PoisonRecord(StrataError):
    """A value in the keyspace is not what its key says; somebody wrote it by hand."""

    code = "POISON_RECORD"


def encode(record: Any) -> bytes:
    """Return the record as JSON; `QuotaExceeded` above `MAX_VALUE_BYTES`."""
    plain = msgspec.json.encode(record, enc_hook=dict)  # a mapping of another kind is written as a dict
    data = b'{"v":%d,' % SCHEMA + plain.removeprefix(b"{")
    if len(data) > MAX_VALUE_BYTES:
        raise QuotaExceeded(
            f"a {type(record).__name__} record of {len(data)} bytes is above {MAX_VALUE_BYTES}",
            hint="shorten its metadata or payload",
        )
    return data


def decode(cls: type[R], data: bytes) -> R:
    """Return the record that `data` holds; `PoisonRecord` when it is not one."""
    try:
        return msgspec.json.decode(data, type=cls)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PoisonRecord(f"not a {cls.__name__} record: {error}: {data[:80]!r}") from error


def b64(data: bytes) -> str:
    """Return bytes as the text that JSON can carry."""
    return base64.b64encode(data).decode("ascii")


def unb64(text: str) -> bytes:
    """Return the bytes that `b64` made `text` of."""
    return base64.b64decode(text, validate=True)
