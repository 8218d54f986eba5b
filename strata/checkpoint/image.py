"""One rank's tensors as a safetensors file: where each lies, and the header that says so.

The header is padded to a multiple of 4096 bytes, so that data begins where direct I/O can write
it; the file ends with its last tensor. Tensors lie without gaps, those of larger items first, so
that each is aligned to its items.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strata.checkpoint.tensors import DTYPES, TensorSpec

ALIGNMENT: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tensor and its bytes `[start, end)` in the file."""

    spec: TensorSpec
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A whole image: the bytes of its header, and its tensors in the order of the file."""

    header: bytes
    places: Mapping[str, Place]
    size_bytes: int

    @property
    def data_bytes(self) -> int:
        return self.size_bytes - len(self.header)


def lay_out(specs: Mapping[str, TensorSpec]) -> Layout:
    """Return where the tensors of `specs` lie in their image."""
    ordered = sorted(specs.items(), key=lambda item: -DTYPES[item[1].dtype].item_bytes)
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "writer": "strata"}}
    ends: dict[str, tuple[int, int]] = {}
    offset = 0
    for name, spec in ordered:
        dtype = DTYPES[spec.dtype]
        ends[name] = (offset, offset + spec.size_bytes)
        offset += spec.size_bytes
        entries[name] = {
            "dtype": dtype.safetensors,
            "shape": [*spec.shape, *dtype.trailing],
            "data_offsets": list(ends[name]),
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    padding = -(8 + len(text)) % ALIGNMENT
    header = (len(text) + padding).to_bytes(8, "little") + text + b" " * padding
    places = {
        name: Place(spec=spec, start=len(header) + ends[name][0], end=len(header) + ends[name][1])
        for name, spec in ordered
    }
    return Layout(header=header, places=places, size_bytes=len(header) + offset)
