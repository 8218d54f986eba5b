"""Errors of etcd: the meaning of a failed call, derived from etcd's answer.

Three kinds must never be confused (PROTOCOLS 2.3):

- *refused*: etcd rejected the call before it wrote anything. etcd's own texts show this, and so do gRPC codes
  that a server returns only after it has examined the request.
- *indeterminate*: everything else. Unavailable, DeadlineExceeded, Cancelled, Unknown, Internal, Unimplemented,
  and unexpected codes. (A connected client receives Unimplemented if a link flipped a bit of the method's name,
  or from a proxy in front of a member.) All become `Unavailable`.
- *stale token*: rejected before anything was written, because etcd no longer knows our login (etcd restarted, the
  token expired, users changed). The connection logs in again and repeats the call.

One trap: "database space exceeded" is *not* a refusal. If the quota is crossed between the check at admission and the
apply, etcd applies the transaction and then answers with that error (its `quotaApplierV3`;
tests/integration/etcd/test_etcd_kv.py shows one). So this error is indeterminate, with a hint that says what to do.
"""

from __future__ import annotations

from typing import Final

import grpc
from grpc.aio import AioRpcError

from strata.core.kv.store import NoSpace
from strata.errors import (
    ConfigError,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    Refused,
    StrataError,
    Unavailable,
)

Code = grpc.StatusCode

COMPACTED_TEXT: Final = "etcdserver: mvcc: required revision has been compacted"

_STALE_TOKEN_TEXTS: Final = frozenset(
    {
        "etcdserver: invalid auth token",
        "etcdserver: revision of auth store is old",
        # no token was sent: etcd required no login when we connected, and requires one now
        "etcdserver: user name is empty",
        # HashKV returns its errors untranslated
        "auth: invalid auth token",
        "auth: user name is empty",
    }
)

# gRPC has no code for a failed handshake: these texts of its TLS library mark errors that the network did not
# cause
_HANDSHAKE_SIGNS: Final = ("SSL_ERROR_SSL", "CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")

_FULL_HINT: Final = "etcd is full: strata etcd defrag --compact, then strata etcd alarm --disarm"
_LOGIN_HINT: Final = "check the user and the password for etcd"

_ROLE_HINT: Final = "etcd's roles of this user do not cover it"

_BY_TEXT: Final[dict[str, tuple[type[StrataError], str]]] = {
    "etcdserver: request is too large": (QuotaExceeded, "etcd's --max-request-bytes"),
    "etcdserver: mvcc: database space exceeded": (NoSpace, _FULL_HINT),
    "etcdserver: authentication failed, invalid user ID or password": (ConfigError, _LOGIN_HINT),
    "etcdserver: user name is empty": (ConfigError, "this etcd requires a user and a password"),
    "etcdserver: permission denied": (Refused, _ROLE_HINT),
    "auth: permission denied": (Refused, _ROLE_HINT),
    "auth: user name is empty": (ConfigError, "this etcd requires a user and a password"),
    "auth: invalid auth token": (ConfigError, _LOGIN_HINT),
    "etcdserver: too many requests": (Unavailable, "etcd is overloaded"),
}

_BY_CODE: Final[dict[Code, type[StrataError]]] = {
    Code.INVALID_ARGUMENT: InvalidArgument,
    Code.OUT_OF_RANGE: InvalidArgument,
    Code.NOT_FOUND: NotFound,
    Code.ALREADY_EXISTS: Refused,
    Code.FAILED_PRECONDITION: Refused,
    Code.PERMISSION_DENIED: Refused,
    Code.UNAUTHENTICATED: ConfigError,
}


class StaleTokenError(Exception):
    """Rejected for lack of a valid token; `meaning` is the error to raise if no new token can be had.

    This exception never leaves the package, so it is not one of Strata's errors.
    """

    def __init__(self, meaning: StrataError) -> None:
        super().__init__(meaning.message)
        self.meaning = meaning


def is_stale_token(error: AioRpcError) -> bool:
    """Return True if etcd rejected the call only because it does not know our token (any more)."""
    return is_stale_token_text(error.details() or "")


def is_stale_token_text(text: str) -> bool:
    """As `is_stale_token`, for a reason inside a message of a stream."""
    return text in _STALE_TOKEN_TEXTS


def plain(reason: str) -> str:
    """Return etcd's text from a watch's cancel reason, which may contain an error as Go prints it."""
    return reason.rpartition(" desc = ")[2]


def is_compacted(error: AioRpcError) -> bool:
    """Return True if the requested revision was compacted."""
    return error.details() == COMPACTED_TEXT


def translate(error: AioRpcError, endpoint: str) -> StrataError:
    """Return Strata's error for a failed call at `endpoint`."""
    return translate_text(error.code(), error.details() or "", endpoint)


def translate_text(code: Code, text: str, endpoint: str) -> StrataError:
    """As `translate`, for an error inside a message of a stream."""
    if (known := _BY_TEXT.get(text)) is not None:
        kind, hint = known
        return kind(f"etcd {endpoint}: {text}", hint=hint)
    if code is Code.RESOURCE_EXHAUSTED and "larger than max" in text:
        # the server's transport refused the message before etcd saw it
        return QuotaExceeded(f"etcd {endpoint}: {text}", hint="etcd's --max-request-bytes")
    if (certain := _BY_CODE.get(code)) is not None:
        return certain(f"etcd {endpoint}: {text}")
    return Unavailable(f"etcd {endpoint}: {code.name}: {text}")


def not_etcd(error: Unavailable) -> ConfigError | None:
    """Return an error that says that the address is not an etcd's, if `error` shows that.

    Only for a client that has not been connected yet, as `handshake_failure` is.
    """
    if f": {Code.UNIMPLEMENTED.name}: " not in error.message:
        return None
    return ConfigError(error.message, hint="is this address an etcd?")


def handshake_failure(error: Unavailable) -> ConfigError | None:
    """Return an error that says what is wrong between our certificates and etcd's, if `error` shows that.

    Only for a client that has not been connected yet: for a connected client, a member with a bad certificate is just
    one member less.
    """
    if not any(sign in error.message for sign in _HANDSHAKE_SIGNS):
        return None
    hint = (
        "check the authority, the names in etcd's certificate, and whether it requires a client certificate"
    )
    return ConfigError(error.message, hint=hint)
