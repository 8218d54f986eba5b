"""Errors over gRPC: every `StrataError` as a gRPC status with details, and back.

An error is sent twice. By the status code, a client in any language can react sensibly without knowing Strata.
From the `Error` message in the trailing metadata, a Strata client restores the same class with the same hint.
The table `STATUS` gives the status of each class.

A code that this version does not know (from a newer server) becomes the class of its status. A status without
our details comes from a transport or a proxy. Such a status becomes `Unavailable` (the call may have taken
effect), unless its code proves a refusal.

grpc's own errors never escape unconverted: calls are made under `translated`.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from strata import errors
from strata.errors import StrataError, Unavailable
from strata.v1 import common_pb2
from strata.wire.errors import KNOWN, made, pack

ERROR_KEY: Final = "strata-error-bin"
"""The trailing metadata that holds a serialized `strata.v1.Error`."""

MAX_TEXT_BYTES: Final = 1024
MAX_MISSING_BYTES: Final = 2048
"""Limits on an error in a trailer: if the trailers exceed 8 KiB, a client sees only that they were too large. A
session sends the whole error."""

Code = grpc.StatusCode

STATUS: Final[dict[type[StrataError], grpc.StatusCode]] = {
    StrataError: Code.INTERNAL,
    errors.ConfigError: Code.FAILED_PRECONDITION,
    errors.DatasetMismatch: Code.FAILED_PRECONDITION,
    errors.InvalidArgument: Code.INVALID_ARGUMENT,
    errors.NotFound: Code.NOT_FOUND,
    errors.Refused: Code.FAILED_PRECONDITION,
    errors.Conflict: Code.ALREADY_EXISTS,
    errors.QuotaExceeded: Code.RESOURCE_EXHAUSTED,
    errors.Unauthenticated: Code.UNAUTHENTICATED,
    errors.PermissionDenied: Code.PERMISSION_DENIED,
    errors.StaleGeneration: Code.ABORTED,
    errors.StaleIncarnation: Code.ABORTED,
    errors.ClusterReplaced: Code.FAILED_PRECONDITION,
    errors.ClusterRestored: Code.FAILED_PRECONDITION,
    errors.NotLeader: Code.UNAVAILABLE,
    errors.Unavailable: Code.UNAVAILABLE,
    errors.TransportBroken: Code.UNAVAILABLE,
    errors.OutcomeUnknown: Code.UNKNOWN,
    errors.BarrierBroken: Code.ABORTED,
    errors.BarrierTimeout: Code.ABORTED,
    errors.StorageError: Code.INTERNAL,
    errors.CheckpointError: Code.FAILED_PRECONDITION,
    errors.CheckpointNotFound: Code.NOT_FOUND,
    errors.CheckpointCorrupt: Code.DATA_LOSS,
    errors.CheckpointIncomplete: Code.DATA_LOSS,
    errors.CheckpointAborted: Code.ABORTED,
    errors.JobDone: Code.FAILED_PRECONDITION,
    errors.JobFailed: Code.FAILED_PRECONDITION,
}
"""The status of each class; a class that is absent has the status of its nearest ancestor.

BARRIER_TIMEOUT does not have the status DEADLINE_EXCEEDED: a client's own deadline gives that status too, and a
client would then take its own deadline for the outcome of a round."""

_BARE: Final[dict[grpc.StatusCode, tuple[type[StrataError], str]]] = {
    Code.INVALID_ARGUMENT: (errors.InvalidArgument, ""),
    Code.OUT_OF_RANGE: (errors.InvalidArgument, ""),
    Code.NOT_FOUND: (errors.NotFound, ""),
    Code.ALREADY_EXISTS: (errors.Conflict, ""),
    Code.FAILED_PRECONDITION: (errors.Refused, ""),
    Code.ABORTED: (errors.Refused, ""),
    Code.RESOURCE_EXHAUSTED: (errors.QuotaExceeded, "a message may have at most 4 MiB"),
    Code.PERMISSION_DENIED: (errors.PermissionDenied, "this identity may not do that"),
    Code.UNAUTHENTICATED: (errors.Unauthenticated, "the server did not accept our credentials"),
    Code.UNIMPLEMENTED: (errors.ConfigError, "is this address a Strata coordinator, of this version?"),
    Code.DATA_LOSS: (StrataError, ""),
}
"""The error class of a status without our details. Other codes prove nothing, and become `Unavailable`."""


def status_of(error: StrataError) -> grpc.StatusCode:
    """Return the gRPC status for `error`."""
    for cls in type(error).__mro__:
        if (code := STATUS.get(cls)) is not None:
            return code
    return Code.INTERNAL


def details(error: StrataError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata that carries `error`, shortened to fit."""
    packed = pack(error)
    packed.message, packed.hint = shortened(error.message), shortened(error.hint)
    left = MAX_MISSING_BYTES
    for at, one in enumerate(packed.missing):
        left -= len(one.encode()) + 3  # its tag and length
        if left < 0:
            del packed.missing[at:]
            break
    return ((ERROR_KEY, packed.SerializeToString()),)


def shortened(text: str) -> str:
    """Return the beginning of `text`, at most `MAX_TEXT_BYTES` long."""
    return text.encode("utf-8", errors="replace")[:MAX_TEXT_BYTES].decode("utf-8", errors="ignore")


def from_rpc(error: grpc.RpcError, target: str) -> StrataError:
    """Return Strata's error for a failed call to `target`."""
    code, text, metadata = _parts(error)
    for key, value in metadata:
        if key == ERROR_KEY and (packed := _parse(value)) is not None:
            if packed.code in KNOWN:
                return made(KNOWN[packed.code], packed)
            cls = _bare(code, packed.message)[0]
            return cls(f"{packed.code}: {packed.message}", hint=packed.hint)
    cls, hint = _bare(code, text)
    if cls is Unavailable:
        return Unavailable(f"{target}: {code.name}: {text}")
    return cls(f"{target}: {text}", hint=hint)


def is_broken_transport(error: grpc.RpcError) -> bool:
    """Return whether an established connection was ended or reset during the call.

    An error that the other side sent as its answer does not count, whatever its text.
    """
    code, text, metadata = _parts(error)
    answered = any(key == ERROR_KEY for key, _value in metadata)
    return code is Code.UNAVAILABLE and not answered and any(words in text for words in _BREAKS)


class translated:  # noqa: N801  # used as a function: `with translated(target):`
    """Convert grpc errors: an error raised inside leaves as a `StrataError` about `target`.

    No `contextmanager`: since Python 3.12 an error that one converts stays, with the failed call and its connection,
    until Python's next collection of cycles.
    """

    def __init__(self, target: str) -> None:
        self._target = target

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, grpc.RpcError):
            raise from_rpc(error, self._target) from error
        if isinstance(error, grpc.aio.BaseError):
            # grpc.aio's own errors: a channel that was closed during the call, a broken completion queue
            raise Unavailable(f"{self._target}: {error}") from error


class Aborts(Protocol):
    """The part of a servicer's context that ends a call with an error."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> NoReturn:
        """End the call."""
        ...


async def abort(context: Aborts, error: StrataError) -> NoReturn:
    """End the call of `context` with `error`. Never returns."""
    await context.abort(status_of(error), shortened(error.message), details(error))


# -- inside -----------------------------------------------------------------------------------

_BREAKS: Final = ("Connection reset", "Socket closed", "Broken pipe", "GOAWAY")
"""grpc 1.85's texts for the end or reset of a connection. grpc's other texts (a ping without an answer, a host
without a route) mean silence. If a new text of grpc is missing in this list, the only effect is a slower reaction."""


def _bare(code: grpc.StatusCode, text: str) -> tuple[type[StrataError], str]:
    if code is Code.UNAVAILABLE and ("CERTIFICATE_VERIFY_FAILED" in text or "handshake failed" in text):
        return errors.ConfigError, "check the authority, the certificate's names and its dates"
    return _BARE.get(code, (Unavailable, ""))


def _parts(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, list[tuple[str, Any]]]:
    """Return code, text and trailing metadata of an error of the aio or of the sync API."""
    code = getattr(error, "code", lambda: None)() or Code.UNKNOWN
    text = getattr(error, "details", lambda: None)() or ""
    metadata = getattr(error, "trailing_metadata", lambda: None)() or ()
    return code, text, list(metadata)


def _parse(value: object) -> common_pb2.Error | None:
    """Return the error in a trailer, or None if the trailer is not ours."""
    if not isinstance(value, bytes):
        return None
    try:
        return common_pb2.Error.FromString(value)
    except DecodeError:
        return None
