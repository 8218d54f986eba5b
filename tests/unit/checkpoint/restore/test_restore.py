from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from strata.checkpoint.restore.restore import Saved, restore_into
from strata.errors import CheckpointError
from tests.unit.checkpoint.saves import snapshot_of


def saved(state: Any) -> Saved:
    snapshot = snapshot_of(state)
    return Saved(
        tree=snapshot.tree,
        rng=snapshot.rng,
        specs={name: place.spec for name, place in snapshot.places.items()},
        data=snapshot.views,
    )


class Counting:
    """An object with its own state, which counts its loads."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.loaded = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded += 1
        self.state = state


def test_tensors_are_copied_in_place_and_plain_values_replaced() -> None:
    tensor, array = torch.zeros(3), np.zeros((2, 2))
    state: dict[str, Any] = {
        "t": tensor,
        "nested": {"a": array, "step": 1, "gone": None},
        "list": [1, tensor],
        "tuple": (array, 2),
    }
    restore_into(
        saved(
            {
                "t": torch.ones(3),
                "nested": {"a": np.ones((2, 2)), "step": 9, "gone": "back", "new": b"raw"},
                "list": [7, torch.ones(3)],
                "tuple": (np.ones((2, 2)), 8),
            }
        ),
        state,
    )
    assert state["t"] is tensor is state["list"][1]
    assert torch.equal(tensor, torch.ones(3))
    assert state["nested"]["a"] is array is state["tuple"][0]
    assert array.sum() == 4
    assert state["nested"]["step"] == 9
    assert (state["nested"]["gone"], state["nested"]["new"]) == ("back", b"raw")
    assert (state["list"][0], state["tuple"][1]) == (7, 8)


def test_values_missing_from_the_state_are_created() -> None:
    array = np.zeros(2, np.float32)
    state: dict[str, Any] = {"t": None, "a": None, "d": {}, "l": [], "of torch": array}
    restore_into(
        saved(
            {
                "t": torch.ones(2),
                "a": np.ones(2),
                "d": OrderedDict(x=np.float32(1)),
                "l": [1, torch.ones(1)],
                "of torch": torch.arange(2.0),
                "not asked for": 1,
            }
        ),
        state,
    )
    assert torch.equal(state["t"], torch.ones(2))
    state["t"] += 1  # the memory is not shared
    assert state["a"].tolist() == [1, 1]
    assert state["d"] == {"x": np.float32(1)}
    assert torch.equal(state["l"][1], torch.ones(1))
    assert state["of torch"] is array
    assert array.tolist() == [0, 1]
    assert "not asked for" not in state


def test_tied_weights_stay_tied() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.weight = one.weight
    net = torch.nn.ModuleDict({"one": one, "other": other})
    checkpoint = saved({"model": net})
    weight = one.weight.detach().clone()
    with torch.no_grad():
        one.weight.zero_()
    restore_into(checkpoint, {"model": net})
    assert other.weight is one.weight
    assert torch.equal(one.weight, weight)


def test_a_part_that_keeps_loaded_tensors_gets_its_own_memory() -> None:
    tensor = torch.ones(2)
    counting = Counting()
    restore_into(saved({"k": Counting(one=tensor, two=tensor)}), {"k": counting})
    counting.state["one"].zero_()
    assert torch.equal(counting.state["two"], torch.ones(2))


@pytest.mark.parametrize(
    ("was", "here", "words"),
    [
        (
            {"a": {"w": torch.ones(2, 3)}},
            {"a": {"w": torch.ones(3, 2)}},
            r"a\.w was saved as float32\[2, 3\]",
        ),
        ({"w": torch.ones(2)}, {"w": torch.ones(2, dtype=torch.bfloat16)}, r"w .* is bfloat16\[2\] here"),
        ({"w": np.ones(2)}, {"w": np.ones(2, np.float32)}, "w was saved as float64"),
        ({"w": torch.ones(2)}, {"w": 3}, "w was saved as a tensor .* is a int here"),
        ({"w": 3}, {"w": torch.ones(2)}, "w was saved as a plain int, and is a tensor here"),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, r"a\.c is not in the checkpoint"),
        ({"a": 1}, {"b": 1}, r"b is not in the checkpoint, which holds \['a'\]"),
        ({"a": 1}, {"a": {}}, "a was saved as a plain int, and is a mapping here"),
        ({"a": {}}, {"a": 1}, "a was saved as a mapping, and is a int here"),
        ({"a": 1}, {"a": [1]}, "a was saved as a plain int, and is a list here"),
        ({"a": [torch.ones(1)]}, {"a": [torch.ones(2)]}, r"a\.0 was saved"),
        ({"a": b"x"}, {"a": 1}, "a was saved as bytes, and is a int here"),
        ({"a": 1}, {"a": b"x"}, "a was saved as a plain int, and is a bytes here"),
        (b"opaque", {"a": 1}, "the state was saved as bytes"),
        (
            {"m": torch.nn.Linear(2, 2)},
            {"m": torch.nn.Linear(3, 2)},
            r"m\.weight was saved as float32\[2, 2\]",
        ),
        ({"m": torch.nn.Linear(2, 2)}, {"m": torch.nn.Linear(2, 2, bias=False)}, "m .*Unexpected key.*bias"),
        ({"m": {"x": 1}}, {"m": torch.nn.Linear(1, 1)}, "m .*Missing key.*weight"),
    ],
)
def test_a_mismatch_between_saved_and_present_state_is_named(
    was: Any, here: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=f"(?s){words}"):
        restore_into(saved(was), here)


def test_nothing_is_changed_when_anything_does_not_fit() -> None:
    tensor, part = torch.zeros(2), Counting()
    state = {"t": tensor, "part": part, "n": 1, "bad": torch.zeros(3)}
    checkpoint = saved({"t": torch.ones(2), "part": Counting(x=1), "n": 2, "bad": torch.zeros(4)})
    with pytest.raises(CheckpointError, match="bad"):
        restore_into(checkpoint, state)
    assert torch.equal(tensor, torch.zeros(2))
    assert (part.loaded, state["n"]) == (0, 1)


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (RuntimeError("Error(s) in loading state_dict for Linear: size mismatch for weight"), True),
        (ValueError("loaded state dict has a different number of parameter groups"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (
            RuntimeError("While copying the parameter named weight, an exception occurred: ('CUDA error',)"),
            False,
        ),
    ],
)
def test_a_device_error_during_a_restore_is_not_a_mismatch(error: Exception, lasting: bool) -> None:
    class Refusing(Counting):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise error

    with pytest.raises(CheckpointError) as caught:
        restore_into(saved({"part": Counting(n=1)}), {"part": Refusing(n=1)})
    assert caught.value.lasting is lasting


def test_memory_that_cannot_be_written_is_named() -> None:
    array = np.zeros(2)
    array.flags.writeable = False
    with pytest.raises(CheckpointError, match="a is a read-only array"):
        restore_into(saved({"a": np.ones(2)}), {"a": array})
    with pytest.raises(CheckpointError, match="e cannot be written"):
        restore_into(saved({"e": torch.ones(5)}), {"e": torch.zeros(1).expand(5)})


@pytest.mark.parametrize("count", [1, 1000, (17 << 20) // 4])
def test_a_tensor_is_filled_in_place_and_its_autograd_version_rises(count: int) -> None:
    values = torch.arange(count, dtype=torch.float32)
    target = torch.nn.Parameter(torch.zeros(count))
    before, address = target._version, target.data_ptr()
    state: dict[str, Any] = {"w": target, "strided": torch.zeros(2 * count)[::2]}
    restore_into(saved({"w": values, "strided": values}), state)
    assert torch.equal(target, values)
    assert torch.equal(state["strided"], values)
    assert (target.data_ptr(), target._version > before) == (address, True)


def test_a_loaded_copy_is_on_the_cpu_whatever_the_default_device() -> None:
    values = torch.arange(5.0)
    part = saved({"w": values})
    with torch.device("meta"):
        built = part.value(part.tree)["w"]
    assert built.device.type == "cpu"
    assert torch.equal(built, values)
