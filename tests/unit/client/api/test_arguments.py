from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from strata.client.api import arguments
from strata.core.spans import MAX_S
from strata.errors import InvalidArgument
from strata.v1.barriers_pb2 import Arrival
from strata.v1.members_pb2 import RankProgress


@pytest.mark.parametrize("value", [2**70, -1, 1.5, "7", None, True, 1 << 20_000], ids=type)
def test_an_invalid_step_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="step") as error:
        arguments.integer("step", value, below=2**63)
    assert error.value.hint
    assert len(error.value.message) < 200


def test_a_step_may_be_a_numpy_integer() -> None:
    step = arguments.integer("step", np.int64(7), below=2**63)
    assert type(step) is int
    assert RankProgress(step=arguments.integer("step", 2**63 - 1, below=2**63)).step == 2**63 - 1


@pytest.mark.parametrize("value", ["5", math.nan, math.inf, 0, -1, 1e300, 10**400, True, [1]])
def test_an_invalid_timeout_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="timeout_s") as error:
        arguments.timeout(value)
    assert error.value.hint


def test_a_timeout_is_seconds_or_none() -> None:
    assert arguments.timeout(None) is None
    assert [arguments.timeout(v) for v in (2, 0.5, np.float32(0.5))] == [2.0, 0.5, 0.5]
    assert Arrival(timeout_ms=round(1000 * MAX_S)).timeout_ms == 10**12


@pytest.mark.parametrize("value", ["text", 5, [b"x"]])
def test_a_payload_is_bytes(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="payload") as error:
        arguments.payload(value)
    assert "encode" in error.value.hint
    assert [arguments.payload(v) for v in (None, b"x", bytearray(b"y"))] == [b"", b"x", b"y"]


@pytest.mark.parametrize("value", ["0", b"0", 0, [2], [-1], [0.5], ["0"], [2**70]])
def test_ranks_must_be_within_the_world(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="rank") as error:
        arguments.ranks(value, 2)
    assert "0 to 1" in error.value.hint
    assert arguments.ranks(np.array([1, 0, 1]), 2) == (0, 1)
    assert arguments.ranks(None, 2) == arguments.ranks([], 2) == ()


def test_a_phase_is_one_short_line() -> None:
    assert arguments.phase("évaluer 1") == "évaluer 1"
    assert arguments.phase("a\x1b[2J\r\nb\u202e\ud800\u2028c\u00a0d") == "a?[2J??b???c\u00a0d"
    assert RankProgress(phase=arguments.phase("é" * 300)).phase == "é" * 200
    with pytest.raises(InvalidArgument, match="phase"):
        arguments.phase(5)


@pytest.mark.parametrize("value", [5, None, "a\nb", "\ud800"])
def test_a_barriers_name_is_text(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="name"):
        arguments.barrier_name(value)
