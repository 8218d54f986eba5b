"""Codec of transactions: from plain data to etcd's messages and back.

Keys are text here and bytes in etcd. Another program's key that is not UTF-8 survives the conversion both ways
(`surrogateescape`), so that keys of other programs cannot break a watch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from strata.core.kv.txn import (
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
from strata.errors import InvalidArgument, Unavailable
from strata.etcdapi import kv_pb2, mvcc_pb2

_RESULTS: Final = {
    Op.EQUAL: kv_pb2.Compare.EQUAL,
    Op.GREATER: kv_pb2.Compare.GREATER,
    Op.LESS: kv_pb2.Compare.LESS,
    Op.NOT_EQUAL: kv_pb2.Compare.NOT_EQUAL,
}

# etcd's constant, the field of the operand, and its type
_TARGETS: Final[dict[Target, tuple[kv_pb2.Compare.CompareTarget.ValueType, str, type]]] = {
    Target.VERSION: (kv_pb2.Compare.VERSION, "version", int),
    Target.CREATE: (kv_pb2.Compare.CREATE, "create_revision", int),
    Target.MOD: (kv_pb2.Compare.MOD, "mod_revision", int),
    Target.VALUE: (kv_pb2.Compare.VALUE, "value", bytes),
    Target.LEASE: (kv_pb2.Compare.LEASE, "lease", int),
}

_DELETED: Final = mvcc_pb2.Event.DELETE


def key_bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def key_text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def end_bytes(range_end: str | None) -> bytes:
    return b"" if range_end is None else range_end.encode("utf-8", "surrogateescape")


# -- to etcd -----------------------------------------------------------------------------------

# Messages are filled in place: twice as fast as passing finished parts to constructors, which copy them.


def encode_txn(txn: Txn) -> kv_pb2.TxnRequest:
    request = kv_pb2.TxnRequest()
    for compare in txn.compares:
        _fill_compare(request.compare.add(), compare)
    for operation in txn.success:
        _fill_operation(request.success.add(), operation)
    for operation in txn.failure:
        _fill_operation(request.failure.add(), operation)
    return request


def encode_range(request: Range) -> kv_pb2.RangeRequest:
    message = kv_pb2.RangeRequest()
    _fill_range(message, request)
    return message


def _fill_compare(message: kv_pb2.Compare, compare: Compare) -> None:
    target, field, kind = _TARGETS[compare.target]
    if not isinstance(compare.operand, kind):
        raise InvalidArgument(
            f"{compare.target.value} is compared with {kind.__name__}, not {type(compare.operand).__name__}"
        )
    message.key = key_bytes(compare.key)
    message.target = target
    message.result = _RESULTS[compare.op]
    setattr(message, field, compare.operand)
    if compare.range_end is not None:
        message.range_end = end_bytes(compare.range_end)


def _fill_operation(message: kv_pb2.RequestOp, operation: Operation) -> None:
    match operation:
        case Put():
            put = message.request_put
            put.key = key_bytes(operation.key)
            put.value = operation.value
            put.lease = operation.lease
        case Delete():
            delete = message.request_delete_range
            delete.key = key_bytes(operation.key)
            delete.range_end = end_bytes(operation.range_end)
        case Range():
            _fill_range(message.request_range, operation)


def _fill_range(message: kv_pb2.RangeRequest, request: Range) -> None:
    message.key = key_bytes(request.key)
    message.range_end = end_bytes(request.range_end)
    message.limit = request.limit
    message.revision = request.revision
    message.serializable = request.serializable
    message.keys_only = request.keys_only
    message.min_mod_revision = request.min_mod_revision


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
    """Return the keys read; `revision` is the store's revision at the read, from the outermost header."""
    return RangeResult(
        revision=revision,
        kvs=tuple([decode_kv(kv) for kv in response.kvs]),
        more=response.more,
        count=response.count,
    )


def decode_txn(response: kv_pb2.TxnResponse, txn: Txn) -> TxnResult:
    """Return the result of `txn`; only the results of its reads are taken from the responses.

    `Unavailable` if they are missing: the answer belongs to another transaction, or was changed on its way.
    """
    succeeded, revision = response.succeeded, response.header.revision
    branch = txn.success if succeeded else txn.failure
    reads = [place for place, operation in enumerate(branch) if type(operation) is Range]
    if not reads:
        return TxnResult(succeeded=succeeded, revision=revision)
    answers = response.responses
    if len(answers) != len(branch) or not all(answers[place].HasField("response_range") for place in reads):
        raise Unavailable("etcd's answer does not match the transaction")
    return TxnResult(
        succeeded=succeeded,
        revision=revision,
        reads=tuple([decode_range(answers[place].response_range, revision) for place in reads]),
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
