"""DCP planners that save plain values as JSON, and never pickle or unpickle.

torch's own planners pass every value that is not a tensor to `torch.save`. To load it they call
`torch.load(weights_only=False)`, which runs any code in the checkpoint.
"""

from __future__ import annotations

import io
import json
from typing import Any

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from strata.checkpoint.format import inline
from strata.checkpoint.format.manifest import as_corrupt
from strata.checkpoint.format.tree_check import check_tree
from strata.checkpoint.snapshot.state import Flat, Json, unflatten
from strata.documents.parsing import PLAIN, json_value
from strata.errors import CheckpointCorrupt, CheckpointError


class JsonSavePlanner(DefaultSavePlanner):
    """torch's planner, for states of tensors and of values that Strata can save without pickle.

    These values are all that a `CheckpointManager` takes, and also bytes, BytesIO, sets, NumPy arrays, torch's
    dtypes, devices and sizes, and tuples that contain tensors. Each is stored in the JSON itself, up to 64 MiB.
    `CheckpointError`, naming the key, for any other value.
    """

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
        """Return the JSON bytes of a plain value, or the tensor itself."""
        if write_item.type != WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        return io.BytesIO(to_json(write_item.index.fqn, object))


class SavedBytes(io.BytesIO):
    """A bytes value of the state itself, saved by a `CheckpointManager`, not a planner's encoding of another value."""


class JsonLoadPlanner(DefaultLoadPlanner):
    """torch's planner, for checkpoints saved with `JsonSavePlanner` or by a `CheckpointManager`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode a plain value and put it at its place in the state."""
        key, data = read_item.dest_index.fqn, value.getvalue()
        found = data if isinstance(value, SavedBytes) else from_json(key, data)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], found)
        else:
            self.state_dict[key] = found


class _Inline(Flat):
    """A flattener that encodes plain values inside the tree itself."""

    __slots__ = ()

    def add(self, key: str, value: object) -> Json:
        tree = inline.to_tree(key, value, self.add)
        return super().add(key, value) if tree is None else tree


def to_json(key: str, value: object) -> bytes:
    """Return the JSON of a plain value; `CheckpointError`, naming the key, for a value that JSON cannot hold."""
    flat = _Inline()
    tree = flat.add(key, value)
    if flat.tensors:
        raise CheckpointError(
            f"{next(iter(flat.tensors))} lies on several ranks, within a plain value of DCP",
            hint="keep such tensors in dictionaries, or in lists of tensors",
        )
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()


def is_json(data: bytes) -> bool:
    """Return whether bytes are JSON; a pickle or the output of `torch.save` never is."""
    try:
        json_value(data, PLAIN)
    except ValueError:
        return False
    return True


def from_json(key: str, data: bytes) -> Any:
    """Return the value that `to_json` encoded."""
    try:
        tree = json_value(data, PLAIN)
    except ValueError as error:
        raise CheckpointError(
            f"{key} was not saved as JSON",
            hint="load it with the planner that belongs to the one it was saved with",
        ) from error

    with as_corrupt(key):
        check_tree(tree)

    def refuse(name: str) -> Any:
        raise CheckpointCorrupt(f"{key} refers to {name}, which JSON cannot hold")

    return unflatten(tree, refuse)
