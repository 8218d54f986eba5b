from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.kv import records
from strata.core.kv.records import (
    MAX_VALUE_BYTES,
    BarrierFloor,
    BarrierOutcome,
    BarrierResult,
    JobSpec,
    PoisonRecord,
    RankFailed,
    WorldHead,
    b64,
    decode,
    encode,
    unb64,
)
from strata.errors import QuotaExceeded

# values that etcd and the writers of records can produce: revisions of 64 bits, finite times
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))

CLASSES: list[Any] = [
    cls
    for _name, cls in inspect.getmembers(records, inspect.isclass)
    if dataclasses.is_dataclass(cls) and cls.__module__ == records.__name__
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_an_encoded_record_decodes_to_itself(cls: Any, data: st.DataObject) -> None:
    record = data.draw(st.builds(cls))
    assert decode(cls, encode(record)) == record


def test_all_records_are_known_here() -> None:
    assert len(CLASSES) >= 25


def test_a_value_is_compact_json_with_its_schema() -> None:
    value = encode(BarrierFloor(round=3))
    assert value == b'{"v":1,"round":3}'
    outcome = BarrierOutcome(generation=1, round=2, result=BarrierResult.TIMED_OUT, digest="", reason="é")
    assert '"reason":"é"'.encode() in encode(outcome)
    assert b'"result":"timed_out"' in encode(outcome)


def test_unknown_fields_are_ignored_and_missing_ones_take_their_default() -> None:
    assert decode(JobSpec, b'{"v":2,"min_workers":2,"colour":"red"}') == JobSpec(min_workers=2)
    assert decode(JobSpec, b'{"settle_s":3}') == JobSpec(settle_s=3.0), "an integer is fine for a float"


@pytest.mark.parametrize(
    ("cls", "value"),
    [
        (BarrierFloor, b""),
        (BarrierFloor, b"nonsense"),
        (BarrierFloor, b"[1]"),
        (BarrierFloor, b"3"),
        (BarrierFloor, b"{}"),
        (BarrierFloor, b'{"round":"3"}'),
        (BarrierFloor, b'{"round":true}'),
        (BarrierFloor, b'{"round":null}'),
        (BarrierFloor, b"\xff\xfe"),
        (RankFailed, b'{"reason":"\xff","worker":"w"}'),
        (RankFailed, b'{"reason":3,"worker":"w"}'),
        (RankFailed, b'{"reason":"r","worker":"w","code":"x"}'),
        (WorldHead, b'{"generation":1,"epoch":1,"members":1,"size":1,"reason":"","restore":3}'),
        (BarrierOutcome, b'{"generation":1,"round":1,"result":"maybe","digest":"","reason":""}'),
        (BarrierOutcome, b'{"generation":1,"round":1,"result":"broken","digest":"","reason":"","missing":3}'),
        (
            BarrierOutcome,
            b'{"generation":1,"round":1,"result":"broken","digest":"","reason":"","payloads":[]}',
        ),
    ],
)
def test_an_invalid_value_is_a_poison_record(cls: Any, value: bytes) -> None:
    with pytest.raises(PoisonRecord, match=cls.__name__):
        decode(cls, value)


@given(st.data(), st.sampled_from(CLASSES))
def test_altered_bytes_decode_to_a_record_or_are_poison(data: st.DataObject, cls: Any) -> None:
    changed = bytearray(encode(data.draw(st.builds(cls))))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PoisonRecord):
        assert isinstance(decode(cls, bytes(changed)), cls)


json_st: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.from_type(int) | st.from_type(float) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.data(), st.sampled_from(CLASSES))
def test_any_json_decodes_to_a_record_or_raises_poison_record(data: st.DataObject, cls: Any) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    body = data.draw(st.dictionaries(st.sampled_from(names), json_st))
    try:
        record = decode(cls, json.dumps(body).encode())
    except PoisonRecord:
        return
    assert isinstance(record, cls)
    assert decode(cls, encode(record)) == record


def test_a_value_above_the_limit_is_refused() -> None:
    fits = RankFailed(reason="x" * (MAX_VALUE_BYTES - 100), worker="w")  # type: ignore[arg-type]  # a WorkerId is a str
    assert len(encode(fits)) <= MAX_VALUE_BYTES
    with pytest.raises(QuotaExceeded, match="RankFailed"):
        encode(dataclasses.replace(fits, reason="x" * MAX_VALUE_BYTES))


@given(st.binary())
def test_bytes_travel_as_text(data: bytes) -> None:
    assert unb64(b64(data)) == data


def test_invalid_base64_is_refused() -> None:
    with pytest.raises(ValueError, match="base64"):
        unb64("no base64!")
