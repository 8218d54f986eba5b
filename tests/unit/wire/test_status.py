"""Every error survives the wire, and a status without Strata's details becomes a sensible error."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from strata import errors
from strata.errors import BarrierTimeout, StrataError, Unavailable, by_code
from strata.v1 import common_pb2
from strata.wire import status
from strata.wire.errors import pack, unpack

Code = grpc.StatusCode
OURS = [cls for cls in by_code().values() if cls.__module__ == errors.__name__]


def rpc_error(code: grpc.StatusCode, text: str = "", **trailing: bytes) -> AioRpcError:
    metadata = Metadata(*((key.replace("_", "-"), value) for key, value in trailing.items()))
    return AioRpcError(code, Metadata(), metadata, details=text)


def over_the_wire(error: StrataError) -> StrataError:
    ((key, value),) = status.details(error)
    assert isinstance(value, bytes)
    metadata = Metadata((key, value))
    return status.from_rpc(AioRpcError(status.status_of(error), Metadata(), metadata), "host:1")


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.code)
def test_every_error_class_has_a_status_and_survives_the_wire(cls: type[StrataError]) -> None:
    assert cls in status.STATUS
    back = over_the_wire(cls("what happened", hint="what to do"))
    assert type(back) is cls
    assert (back.message, back.hint) == ("what happened", "what to do")


def test_the_missing_ranks_of_a_barrier_come_back() -> None:
    back = over_the_wire(BarrierTimeout("2 of 4 arrived", missing=["rank 1 (w1)", "rank 3 (w3)"]))
    assert isinstance(back, BarrierTimeout)
    assert back.missing == ("rank 1 (w1)", "rank 3 (w3)")


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 5000, "\N{SNOWMAN}" * 5000])
def test_an_error_too_large_for_a_trailer_is_truncated(text: str) -> None:
    """gRPC refuses metadata of more than 8 KiB. A client would then get that refusal in place of the error."""
    error = BarrierTimeout(text, missing=[f"rank {rank}" for rank in range(2000)], hint=text)
    ((_key, packed),) = status.details(error)
    assert len(packed) < 4500, "and a third more in base64"
    back = over_the_wire(error)
    assert isinstance(back, BarrierTimeout)
    assert back.message
    assert text.startswith(back.message)
    assert back.missing[:2] == ("rank 0", "rank 1")
    assert len(back.missing) > 150


def test_a_class_without_a_row_has_its_ancestors_status() -> None:
    class Newer(errors.Conflict):
        code = "NEWER"

    assert status.status_of(Newer("x")) is Code.ALREADY_EXISTS


def test_an_unknown_code_becomes_the_class_of_its_status() -> None:
    packed = common_pb2.Error(code="FROM_THE_FUTURE", message="m", hint="h").SerializeToString()
    back = status.from_rpc(rpc_error(Code.NOT_FOUND, "m", strata_error_bin=packed), "host:1")
    assert type(back) is errors.NotFound
    assert back.message == "FROM_THE_FUTURE: m"
    assert back.hint == "h"


@pytest.mark.parametrize(("retryable", "cls"), [(True, Unavailable), (False, StrataError)])
def test_an_unknown_code_in_a_message_is_classified_by_its_retryable_flag(
    retryable: bool, cls: type[StrataError]
) -> None:
    back = unpack(common_pb2.Error(code="FROM_THE_FUTURE", message="m", retryable=retryable))
    assert type(back) is cls
    assert "FROM_THE_FUTURE" in back.message


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (Code.UNAVAILABLE, Unavailable),
        (Code.DEADLINE_EXCEEDED, Unavailable),
        (Code.CANCELLED, Unavailable),
        (Code.UNKNOWN, Unavailable),
        (Code.INTERNAL, Unavailable),
        (Code.INVALID_ARGUMENT, errors.InvalidArgument),
        (Code.RESOURCE_EXHAUSTED, errors.QuotaExceeded),
        (Code.UNIMPLEMENTED, errors.ConfigError),
    ],
)
def test_a_bare_status_is_indeterminate_unless_it_proves_a_refusal(
    code: grpc.StatusCode, cls: type[StrataError]
) -> None:
    back = status.from_rpc(rpc_error(code, "proxy says no"), "host:1")
    assert type(back) is cls
    assert "host:1" in back.message
    assert "proxy says no" in back.message


def test_a_certificate_that_is_refused_is_a_matter_of_configuration() -> None:
    text = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1a000064"
    assert type(status.from_rpc(rpc_error(Code.UNAVAILABLE, text), "h")) is errors.ConfigError


def test_a_trailer_that_is_not_ours_is_passed_over() -> None:
    back = status.from_rpc(rpc_error(Code.NOT_FOUND, "m", strata_error_bin=b"\xff\xff\xff"), "h")
    assert type(back) is errors.NotFound


def test_grpc_errors_leave_as_ours_and_others_as_they_are() -> None:
    with pytest.raises(Unavailable, match="host:1"), status.translated("host:1"):
        raise rpc_error(Code.UNAVAILABLE, "connection refused")
    with pytest.raises(Unavailable, match="channel is closed"), status.translated("host:1"):
        raise grpc.aio.UsageError("channel is closed")
    with pytest.raises(KeyError), status.translated("host:1"):
        raise KeyError("mine")


@pytest.mark.parametrize(
    ("code", "text", "broken"),
    [
        (Code.UNAVAILABLE, "Stream removed (Socket closed)", True),
        (Code.UNAVAILABLE, "Stream removed (recvmsg:Connection reset by peer (104))", True),
        (Code.UNAVAILABLE, "sendmsg:Broken pipe (32)", True),
        (Code.UNAVAILABLE, "GOAWAY received; Error code: 0", True),
        (Code.UNAVAILABLE, "keepalive watchdog timeout", False),
        (Code.UNAVAILABLE, "ping timeout", False),
        (Code.UNAVAILABLE, "recvmsg:Connection timed out (110)", False),
        (Code.UNAVAILABLE, "failed to connect to all addresses; connection refused", False),
        (Code.DEADLINE_EXCEEDED, "Socket closed", False),
        (Code.CANCELLED, "Socket closed", False),
    ],
)
def test_a_closed_connection_is_distinguished_from_a_silent_one(
    code: grpc.StatusCode, text: str, broken: bool
) -> None:
    assert status.is_broken_transport(rpc_error(code, text)) is broken


def test_an_error_that_quotes_a_broken_connection_is_still_an_answer() -> None:
    packed = pack(Unavailable("r2: Socket closed")).SerializeToString()
    error = rpc_error(Code.UNAVAILABLE, "r2: Socket closed", strata_error_bin=packed)
    assert not status.is_broken_transport(error)
