"""Encoding of records as values of the keyspace: JSON, with the schema number in `v`.

Unknown fields are ignored and missing fields take their default, so that replicas of neighbouring
versions can read each other's records.
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
    """A value in the keyspace does not decode as the record that its key implies; it was probably written by hand."""

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
    """Return the record that `data` encodes; `PoisonRecord` if `data` is no such record."""
    try:
        return msgspec.json.decode(data, type=cls)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PoisonRecord(f"not a {cls.__name__} record: {error}: {data[:80]!r}") from error


def b64(data: bytes) -> str:
    """Return bytes as base64 text, which JSON can carry."""
    return base64.b64encode(data).decode("ascii")


def unb64(text: str) -> bytes:
    """Return the bytes that `b64` encoded as `text`."""
    return base64.b64decode(text, validate=True)
