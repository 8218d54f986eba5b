"""Errors as messages: every `StrataError` as a `strata.v1.Error`, and back.

`strata.wire.status` puts the same message into gRPC's trailing metadata; a session carries the message
unchanged.
"""

from __future__ import annotations

from typing import Final

from strata import errors
from strata.errors import BarrierBroken, StrataError, Unavailable, by_code
from strata.v1 import common_pb2

KNOWN: Final = {code: cls for code, cls in by_code().items() if cls.__module__ == errors.__name__}


def pack(error: StrataError) -> common_pb2.Error:
    """Return `error` as a message."""
    missing = error.missing if isinstance(error, BarrierBroken) else ()
    return common_pb2.Error(
        code=error.code,
        message=error.message,
        hint=error.hint,
        retryable=error.retryable,
        missing=missing,
    )


def unpack(message: common_pb2.Error) -> StrataError:
    """Return the error in `message`; for an unknown code, `Unavailable` if it is retryable, else `StrataError`."""
    cls = KNOWN.get(message.code)
    if cls is None:
        cls = Unavailable if message.retryable else StrataError
        return cls(f"{message.code}: {message.message}", hint=message.hint)
    return made(cls, message)


def made(cls: type[StrataError], message: common_pb2.Error) -> StrataError:
    """Return the error of class `cls` with the contents of `message`."""
    if issubclass(cls, BarrierBroken):
        return cls(message.message, missing=message.missing, hint=message.hint)
    return cls(message.message, hint=message.hint)
