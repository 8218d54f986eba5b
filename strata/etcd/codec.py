"""Transactions as data to etcd's messages and back.

Keys are text here and bytes there. A foreign key that is not UTF-8 survives the way there and back
(`surrogateescape`), so that nothing somebody else writes can break a watch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from strata.core.txn import (
    Compare,
    Delete,
    Event,
    KeyValue,
    Op,
    Operation,
    Put,
    Range,
    RangeResult,
    Target,
    Txn,
    TxnResult,
)
from strata.errors import InvalidArgument
from strata.etcdapi import kv_pb2, mvcc_pb2

_RESULTS: Final = {
    Op.EQUAL: kv_pb2.Compare.EQUAL,
    Op.GREATER: kv_pb2.Compare.GREATER,
    Op.LESS: kv_pb2.Compare.LESS,
    Op.NOT_EQUAL: kv_pb2.Compare.NOT_EQUAL,
}

_DELETED: Final = mvcc_pb2.Event.DELETE


def key_bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def key_text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def end_bytes(range_end: str | None) -> bytes:
    return b"" if range_end is None else range_end.encode("utf-8", "surrogateescape")


# -- to etcd -----------------------------------------------------------------------------------


def encode_txn(txn: Txn) -> kv_pb2.TxnRequest:
    return kv_pb2.TxnRequest(
        compare=[encode_compare(compare) for compare in txn.compares],
        success=[encode_operation(operation) for operation in txn.success],
        failure=[encode_operation(operation) for operation in txn.failure],
    )


def encode_compare(compare: Compare) -> kv_pb2.Compare:
    operand = compare.operand
    key, end = key_bytes(compare.key), end_bytes(compare.range_end)
    result = _RESULTS[compare.op]
    if compare.target is Target.VALUE:
        if not isinstance(operand, bytes):
            raise InvalidArgument(f"a value is compared with bytes, not {type(operand).__name__}")
        return kv_pb2.Compare(
            result=result, target=kv_pb2.Compare.VALUE, key=key, range_end=end, value=operand
        )
    if isinstance(operand, bytes):
        raise InvalidArgument(f"{compare.target.value} is compared with a number, not bytes")
    match compare.target:
        case Target.VERSION:
            return kv_pb2.Compare(
                result=result, target=kv_pb2.Compare.VERSION, key=key, range_end=end, version=operand
            )
        case Target.CREATE:
            return kv_pb2.Compare(
                result=result,
                target=kv_pb2.Compare.CREATE,
                key=key,
                range_end=end,
                create_revision=operand,
            )
        case Target.MOD:
            return kv_pb2.Compare(
                result=result, target=kv_pb2.Compare.MOD, key=key, range_end=end, mod_revision=operand
            )
        case Target.LEASE:
            return kv_pb2.Compare(
                result=result, target=kv_pb2.Compare.LEASE, key=key, range_end=end, lease=operand
            )


def encode_operation(operation: Operation) -> kv_pb2.RequestOp:
    match operation:
        case Put():
            return kv_pb2.RequestOp(
                request_put=kv_pb2.PutRequest(
                    key=key_bytes(operation.key), value=operation.value, lease=operation.lease
                )
            )
        case Delete():
            return kv_pb2.RequestOp(
                request_delete_range=kv_pb2.DeleteRangeRequest(
                    key=key_bytes(operation.key), range_end=end_bytes(operation.range_end)
                )
            )
        case Range():
            return kv_pb2.RequestOp(request_range=encode_range(operation))


def encode_range(request: Range) -> kv_pb2.RangeRequest:
    return kv_pb2.RangeRequest(
        key=key_bytes(request.key),
        range_end=end_bytes(request.range_end),
        limit=request.limit,
        revision=request.revision,
        serializable=request.serializable,
        keys_only=request.keys_only,
    )


# -- from etcd ---------------------------------------------------------------------------------


def decode_kv(kv: mvcc_pb2.KeyValue) -> KeyValue:
    return KeyValue(
        key=kv.key.decode("utf-8", "surrogateescape"),
        value=kv.value,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        version=kv.version,
        lease=kv.lease,
    )


def decode_range(response: kv_pb2.RangeResponse, revision: int) -> RangeResult:
    """Return the keys read; `revision` is the store's at that time, from the outermost header."""
    return RangeResult(
        revision=revision, kvs=tuple([decode_kv(kv) for kv in response.kvs]), more=response.more
    )


def decode_txn(response: kv_pb2.TxnResponse) -> TxnResult:
    revision = response.header.revision
    return TxnResult(
        succeeded=response.succeeded,
        revision=revision,
        reads=tuple(
            [
                decode_range(answer.response_range, revision)
                for answer in response.responses
                if answer.HasField("response_range")
            ]
        ),
    )


def decode_events(events: Iterable[mvcc_pb2.Event], newer_than: int) -> tuple[Event, ...]:
    """Return the events above a revision, in etcd's order."""
    return tuple(
        [
            Event(kv=decode_kv(event.kv), deleted=event.type == _DELETED)
            for event in events
            if event.kv.mod_revision > newer_than
        ]
    )
