"""What a failed call means, told from etcd's answer.

Three kinds must never be confused (PROTOCOLS 2.3):

- *refused*: etcd said no before it wrote anything. Known by its own texts and by gRPC codes that
  only a server that looked at the request gives.
- *indeterminate*: everything else. Unavailable, DeadlineExceeded, Cancelled, Unknown, Internal,
  Unimplemented (to a client at work a link that flipped a bit of the method's name, or a proxy in
  front of a member), and codes nobody expects. All become `Unavailable`.
- *stale token*: refused before anything was written, because etcd forgot our login (it restarted,
  the token expired, users changed). The connection logs in again and repeats the call.

One trap: "database space exceeded" is *not* a refusal. When the quota is crossed between the check
at the door and the apply, etcd applies the transaction and then answers with that error (its
`quotaApplierV3`; tests/integration/test_etcd_quota.py shows one). So it is indeterminate, with a
hint that says what to do.
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
        # no token was sent: login was not asked for when we connected, and is now
        "etcdserver: user name is empty",
        # HashKV leaves its errors as they are
        "auth: invalid auth token",
        "auth: user name is empty",
    }
)

# gRPC has no code of its own for it: texts of its TLS library, for errors that are not the network's
_HANDSHAKE_SIGNS: Final = ("SSL_ERROR_SSL", "CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")

_FULL_HINT: Final = "etcd is full: strata etcd defrag --compact, then strata etcd alarm --disarm"
_LOGIN_HINT: Final = "check the user and the password for etcd"

_ROLE_HINT: Final = "etcd's roles of this user do not cover it"

_BY_TEXT: Final[dict[str, tuple[type[StrataError], str]]] = {
    "etcdserver: request is too large": (QuotaExceeded, "etcd's --max-request-bytes"),
    "etcdserver: mvcc: database space exceeded": (NoSpace, _FULL_HINT),
    "etcdserver: authentication failed, invalid user ID or password": (ConfigError, _LOGIN_HINT),
    "etcdserver: user name is empty": (ConfigError, "this etcd asks for a user and a password"),
    "etcdserver: permission denied": (Refused, _ROLE_HINT),
    "auth: permission denied": (Refused, _ROLE_HINT),
    "auth: user name is empty": (ConfigError, "this etcd asks for a user and a password"),
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
    """Refused for want of a valid token; `meaning` is the error for who cannot get a new one.

    It never leaves this package, and so stands outside the tree of Strata's errors.
    """

    def __init__(self, meaning: StrataError) -> None:
        super().__init__(meaning.message)
        self.meaning = meaning


def is_stale_token(error: AioRpcError) -> bool:
    """Hold when etcd refused the call only because it does not know our token (any more)."""
    return is_stale_token_text(error.details() or "")


def is_stale_token_text(text: str) -> bool:
    """As `is_stale_token`, for the reason that came inside a message of a stream."""
    return text in _STALE_TOKEN_TEXTS


def plain(reason: str) -> str:
    """Return etcd's text out of a watch's cancel reason, which may hold an error as Go prints it."""
    return reason.rpartition(" desc = ")[2]


def is_compacted(error: AioRpcError) -> bool:
    """Hold when the revision asked for is gone."""
    return error.details() == COMPACTED_TEXT


def translate(error: AioRpcError, endpoint: str) -> StrataError:
    """Return Strata's error for a failed call at `endpoint`."""
    return translate_text(error.code(), error.details() or "", endpoint)


def translate_text(code: Code, text: str, endpoint: str) -> StrataError:
    """As `translate`, for an error that came inside a message of a stream."""
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
    """Return an error that says that somebody else answers there, if `error` says so.

    Only for who has not been connected yet, as `handshake_failure` is.
    """
    if f": {Code.UNIMPLEMENTED.name}: " not in error.message:
        return None
    return ConfigError(error.message, hint="is this address an etcd?")


def handshake_failure(error: Unavailable) -> ConfigError | None:
    """Return an error that says what is wrong between our certificates and etcd's, if that is it.

    Only for who has not been connected yet: to a client at work a member with a bad certificate is
    one member less.
    """
    if not any(sign in error.message for sign in _HANDSHAKE_SIGNS):
        return None
    hint = "check the authority, the names in etcd's certificate, and whether it asks for one of ours"
    return ConfigError(error.message, hint=hint)
