"""The table that separates refusals from unknown outcomes."""

from __future__ import annotations

import grpc
import pytest

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
from strata.etcd import errors

Code = grpc.StatusCode

REFUSALS = [
    (Code.INVALID_ARGUMENT, "etcdserver: key is not provided", InvalidArgument),
    (Code.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request", InvalidArgument),
    (Code.INVALID_ARGUMENT, "etcdserver: too many operations in txn request", InvalidArgument),
    (Code.INVALID_ARGUMENT, "etcdserver: request is too large", QuotaExceeded),
    (Code.RESOURCE_EXHAUSTED, "grpc: received message larger than max (9 vs. 8)", QuotaExceeded),
    (Code.NOT_FOUND, "etcdserver: requested lease not found", NotFound),
    (Code.OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision", InvalidArgument),
    (Code.PERMISSION_DENIED, "etcdserver: permission denied", Refused),
    (Code.UNAUTHENTICATED, "etcdserver: invalid auth token", ConfigError),
    (Code.INVALID_ARGUMENT, "etcdserver: user name is empty", ConfigError),
    (Code.FAILED_PRECONDITION, "etcdserver: not leader", Refused),
]


@pytest.mark.parametrize(("code", "text", "kind"), REFUSALS)
def test_refusals(code: grpc.StatusCode, text: str, kind: type[StrataError]) -> None:
    meaning = errors.translate_text(code, text, "host:1")
    assert type(meaning) is kind
    assert meaning.message == f"etcd host:1: {text}"


CERTAIN = ({code for code, _, _ in REFUSALS} | {Code.ALREADY_EXISTS, Code.OK}) - {Code.RESOURCE_EXHAUSTED}


@pytest.mark.parametrize("code", [code for code in Code if code not in CERTAIN])
def test_every_other_code_is_indeterminate(code: grpc.StatusCode) -> None:
    assert type(errors.translate_text(code, "whatever", "host:1")) is Unavailable


def test_a_full_etcd_is_indeterminate_because_it_may_have_written() -> None:
    text = "etcdserver: mvcc: database space exceeded"
    meaning = errors.translate_text(Code.RESOURCE_EXHAUSTED, text, "host:1")
    assert type(meaning) is NoSpace
    assert isinstance(meaning, Unavailable)
    assert "strata etcd defrag --compact" in meaning.hint


def test_a_failed_tls_handshake_is_reported_with_a_hint() -> None:
    text = (
        "failed to connect to all addresses; last error: Tls handshake failed: SSL_ERROR_SSL: BAD_SIGNATURE"
    )
    meaning = errors.translate_text(Code.UNAVAILABLE, text, "host:1")
    assert type(meaning) is Unavailable
    message = errors.handshake_failure(meaning)
    assert message is not None
    assert "authority" in message.hint
    assert errors.handshake_failure(Unavailable("Tls handshake failed: Socket closed")) is None
