from __future__ import annotations

import enum
import json
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.checkpoint.snapshot import rng
from strata.checkpoint.snapshot.snapshot import Arena, take_snapshot
from strata.checkpoint.snapshot.state import MAX_DEPTH, Flat, unflatten
from strata.checkpoint.snapshot.tensors import build
from strata.errors import CheckpointCorrupt, CheckpointError


def round_trip(value: Any) -> Any:
    """Take a value through tree, JSON and snapshot."""
    flat = Flat()
    tree = flat.add("", value)
    snapshot = take_snapshot(flat, tree=tree, rng=None, arena=Arena())
    read = json.loads(json.dumps(snapshot.tree, allow_nan=False))
    places = snapshot.places
    return unflatten(read, lambda name: build(name, places[name].spec, snapshot.views[name]))


def same(one: Any, other: Any) -> bool:
    """Return whether both are equal, with equal types at every level; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other))
    if isinstance(one, np.ndarray | np.generic):
        like = one.dtype == other.dtype and one.shape == other.shape
        return bool(like and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


_NUMPY = ["bool", "uint8", "int16", "uint32", "int64", "float16", "float32", "float64", "complex64"]
_arrays = st.builds(
    lambda dtype, shape, seed: (
        np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
        if dtype == "bool"
        else np.asarray(np.random.default_rng(seed).standard_normal(shape) * 100).astype(dtype)
    ),
    st.sampled_from(_NUMPY),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 1000),
)
_TORCH = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex128, torch.float8_e4m3fn]
_tensors = st.builds(
    lambda dtype, shape, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype),
    st.sampled_from(_TORCH),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 1000),
)
_plain = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    | st.sampled_from([np.float32(1.5), np.int64(-7), np.bool_(1), np.complex64(1 + 2j), np.float64("nan")])
)  # fmt: skip
_keys = st.text() | st.integers() | st.none() | st.booleans() | st.tuples(st.integers(), st.text())
_states = st.recursive(
    _plain | _arrays | _tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_keys, inner, max_size=4)
        | st.dictionaries(_keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(state=st.dictionaries(st.text(), _states, max_size=5))
def test_a_flattened_state_is_restored_unchanged(state: dict[str, Any]) -> None:
    assert same(round_trip(state), state)


def test_paths_with_equal_text_stay_distinct() -> None:
    state = {
        "a": {"b.c": np.ones(1)},
        "a.b": {"c": np.zeros(1)},
        "": np.ones(2),
        "__metadata__": np.ones(3),
        "counter": Counter("hello"),
    }
    flat = Flat()
    flat.add("", state)
    assert sorted(flat.tensors) == ["__metadata__~2", "a.b.c", "a.b.c~2", "~2"]
    assert same(round_trip(state), state)


def test_a_tied_tensor_is_written_once() -> None:
    weight = torch.randn(4, 4)
    flat = Flat()
    flat.add(
        "", {"encoder": weight, "decoder": weight.view(4, 4), "transposed": weight.t(), "part": weight[0]}
    )
    assert sorted(flat.tensors) == ["encoder", "part", "transposed"]


def test_views_and_foreign_byte_orders_are_saved_by_their_values() -> None:
    base = np.arange(24.0).reshape(4, 6)
    back = round_trip({"t": base.T, "s": base[::2, 1::3], "big": np.arange(3, dtype=">i4")})
    assert np.array_equal(back["t"], base.T)
    assert np.array_equal(back["s"], base[::2, 1::3])
    assert np.array_equal(back["big"], [0, 1, 2])
    strided = torch.arange(24.0).reshape(4, 6)
    values = torch.tensor([1 + 2j])
    back = round_trip(
        {"t": strided.t(), "e": torch.ones(1).expand(5), "values": values, "conj": values.conj()}
    )
    assert same(back["conj"], values.conj().resolve_conj())
    assert torch.equal(back["t"], strided.t())
    assert torch.equal(back["e"], torch.ones(5))


def test_a_module_and_an_optimizer_are_saved_as_their_state_dict() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    back = round_trip({"model": net, "optim": optimizer})
    assert same(dict(back["model"]), dict(net.state_dict()))
    assert back["model"]._metadata == getattr(net.state_dict(), "_metadata")  # noqa: B009
    assert same(back["optim"], optimizer.state_dict())


class Colour(enum.IntEnum):
    RED = 1


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"a": [1, {"b": Thing()}]}, "a.1.b"),
        ({"a": Colour.RED}, "a"),
        ({"a": {1, 2}}, "a"),
        ({"a": deque([1])}, "a"),
        ({"a": 1 << 20_000}, "a"),
        ({"a": 1j}, "a"),
        ({"a": np.array([object()])}, "a"),
        ({"a": np.array(["text"])}, "a"),
        ({"a": np.datetime64("2026-01-01")}, "a"),
        ({"a": np.ma.masked_array([1.0], mask=[True])}, "a"),
        ({"a": torch.eye(2).to_sparse()}, "a"),
        ({"a": torch.empty(2, device="meta")}, "a"),
        ({"a": {Thing(): 1}}, "a"),
        ({"a": lambda: 1}, "a"),
    ],
)
def test_an_unsupported_value_is_an_error_that_names_the_key(value: Any, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"\b{key}\b"):
        Flat().add("", value)


def test_a_cycle_is_an_error_and_a_shared_part_is_not() -> None:
    part = [1]
    assert round_trip({"a": part, "b": part}) == {"a": [1], "b": [1]}
    cycle: dict[str, Any] = {}
    cycle["self"] = {"again": cycle}
    with pytest.raises(CheckpointError, match=r"self\.again contains itself"):
        Flat().add("", cycle)
    with pytest.raises(CheckpointCorrupt):
        unflatten({"q": 1}, str)


def test_restored_random_generators_continue_their_sequence() -> None:
    states = round_trip(rng.capture())
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    rng.restore(states)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def nested(depth: int, kind: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = kind(value)
    return value


@pytest.mark.parametrize("kind", [lambda v: {"a": v}, lambda v: [v], lambda v: (v,)])
def test_a_too_deeply_nested_state_is_an_error_that_names_the_path(kind: Callable[[Any], Any]) -> None:
    deepest = nested(MAX_DEPTH, kind)
    tree = json.loads(json.dumps(Flat().add("s", deepest)))
    assert unflatten(tree, lambda name: name) == deepest
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(CheckpointError, match=r"s\.(a|0)\.") as error:
            Flat().add("s", nested(depth, kind))
        assert error.value.hint
        assert len(error.value.message) < 400
