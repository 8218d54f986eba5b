"""Every field of a transaction is encoded in etcd's message, and every field of an answer is decoded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.kv.txn import Compare, Delete, KeyValue, Op, Operation, Put, Range, Target, Txn
from strata.errors import InvalidArgument, Unavailable
from strata.etcd import codec
from strata.etcdapi import header_pb2, kv_pb2, mvcc_pb2

NUMBERS = {
    Target.VERSION: (kv_pb2.Compare.VERSION, "version"),
    Target.CREATE: (kv_pb2.Compare.CREATE, "create_revision"),
    Target.MOD: (kv_pb2.Compare.MOD, "mod_revision"),
    Target.LEASE: (kv_pb2.Compare.LEASE, "lease"),
}
RESULTS = {
    Op.EQUAL: kv_pb2.Compare.EQUAL,
    Op.NOT_EQUAL: kv_pb2.Compare.NOT_EQUAL,
    Op.GREATER: kv_pb2.Compare.GREATER,
    Op.LESS: kv_pb2.Compare.LESS,
}


def encoded(compare: Compare) -> kv_pb2.Compare:
    (sent,) = codec.encode_txn(Txn(compares=(compare,))).compare
    return sent


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("op", list(Op))
def test_compares(target: Target, op: Op) -> None:
    operand = b"seven" if target is Target.VALUE else 7
    sent = encoded(Compare(key="k", range_end="l", target=target, op=op, operand=operand))
    kind, field = NUMBERS.get(target, (kv_pb2.Compare.VALUE, "value"))
    assert (sent.key, sent.range_end, sent.target, sent.result) == (b"k", b"l", kind, RESULTS[op])
    assert sent.WhichOneof("target_union") == field
    assert getattr(sent, field) == operand


@pytest.mark.parametrize("target", NUMBERS)
def test_a_compare_with_zero_is_encoded(target: Target) -> None:
    sent = encoded(Compare(key="k", target=target, op=Op.EQUAL, operand=0))
    assert sent.WhichOneof("target_union") == NUMBERS[target][1]


@pytest.mark.parametrize(("target", "operand"), [(Target.VALUE, 7), (Target.MOD, b"seven")])
def test_a_compare_with_the_wrong_kind_of_operand_is_refused(target: Target, operand: int | bytes) -> None:
    with pytest.raises(InvalidArgument, match="compared with"):
        encoded(Compare(key="k", target=target, op=Op.EQUAL, operand=operand))


def test_operations_keep_their_order_and_branch() -> None:
    txn = Txn(
        success=(Put(key="a", value=b"1", lease=9), Delete(key="b"), Delete(key="c", range_end="d")),
        failure=(Range(key="e", range_end="f", revision=3, limit=2, keys_only=True),),
    )
    sent = codec.encode_txn(txn)
    put, one, many = sent.success
    assert put.request_put == kv_pb2.PutRequest(key=b"a", value=b"1", lease=9)
    assert one.request_delete_range == kv_pb2.DeleteRangeRequest(key=b"b")
    assert many.request_delete_range == kv_pb2.DeleteRangeRequest(key=b"c", range_end=b"d")
    assert [operation.request_range for operation in sent.failure] == [
        kv_pb2.RangeRequest(key=b"e", range_end=b"f", revision=3, limit=2, keys_only=True)
    ]


@pytest.mark.parametrize("operation", [Put(key="k", value=b""), Delete(key="k"), Range(key="k")])
def test_an_operation_of_default_values_is_still_encoded(operation: Operation) -> None:
    (sent,) = codec.encode_txn(Txn(success=(operation,))).success
    assert sent.WhichOneof("request") is not None


def test_a_serializable_read_is_encoded_as_one() -> None:
    assert codec.encode_range(Range(key="k", serializable=True)).serializable
    assert not codec.encode_range(Range(key="k")).serializable


@pytest.mark.parametrize("succeeded", [True, False])
def test_reads_of_a_transaction_come_in_order_between_its_writes(succeeded: bool) -> None:
    def read(*keys: bytes, more: bool = False) -> kv_pb2.ResponseOp:
        kvs = [mvcc_pb2.KeyValue(key=key) for key in keys]
        return kv_pb2.ResponseOp(response_range=kv_pb2.RangeResponse(kvs=kvs, more=more))

    taken = (Range(key="a", range_end="c"), Put(key="w", value=b""), Range(key="x"))
    other = (Delete(key="w"),)
    result = codec.decode_txn(
        kv_pb2.TxnResponse(
            header=header_pb2.ResponseHeader(revision=12),
            succeeded=succeeded,
            responses=[
                read(b"a", b"b", more=True),
                kv_pb2.ResponseOp(response_put=kv_pb2.PutResponse()),
                read(),
            ],
        ),
        Txn(success=taken, failure=other) if succeeded else Txn(success=other, failure=taken),
    )
    assert (result.succeeded, result.revision) == (succeeded, 12)
    assert [[kv.key for kv in answer.kvs] for answer in result.reads] == [["a", "b"], []]
    assert [(answer.revision, answer.more) for answer in result.reads] == [(12, True), (12, False)]


def test_all_fields_of_a_key_value_are_decoded() -> None:
    kv = mvcc_pb2.KeyValue(key=b"k", value=b"v", create_revision=1, mod_revision=2, version=3, lease=4)
    assert codec.decode_kv(kv) == KeyValue(
        key="k", value=b"v", create_revision=1, mod_revision=2, version=3, lease=4
    )


def test_events_not_newer_are_dropped() -> None:
    events = [
        mvcc_pb2.Event(
            type=mvcc_pb2.Event.DELETE, kv=mvcc_pb2.KeyValue(key=b"%d" % revision, mod_revision=revision)
        )
        for revision in (4, 5, 6)
    ]
    decoded = codec.decode_events(events, 4)
    assert [(event.kv.key, event.deleted) for event in decoded] == [("5", True), ("6", True)]


@given(st.binary())
def test_any_foreign_key_survives(key: bytes) -> None:
    assert codec.key_bytes(codec.key_text(key)) == key


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_ascii_keys_keep_their_order(one: bytes, other: bytes) -> None:
    one, other = bytes(byte & 0x7F for byte in one), bytes(byte & 0x7F for byte in other)
    assert (one < other) == (codec.key_text(one) < codec.key_text(other))


@pytest.mark.parametrize(
    "responses",
    [
        [],
        [kv_pb2.ResponseOp(response_range=kv_pb2.RangeResponse())],
        [kv_pb2.ResponseOp(response_put=kv_pb2.PutResponse())] * 2,
    ],
)
def test_an_answer_that_does_not_fit_its_transaction_is_unavailable(
    responses: list[kv_pb2.ResponseOp],
) -> None:
    txn = Txn(success=(Put(key="a", value=b""), Range(key="b")))
    with pytest.raises(Unavailable):
        codec.decode_txn(kv_pb2.TxnResponse(succeeded=True, responses=responses), txn)
