"""One rank's tensors as a safetensors file: the layout, and the header that describes it.

The header is padded to a multiple of 4096 bytes, so that the data begins at an offset that direct I/O can write;
the file ends with its last tensor. There are no gaps between tensors. Tensors with larger items come first, so that
each tensor is aligned to its item size.

If the image has only some chunks of a tensor, these chunks are stored as plain bytes: one U8 tensor for each run of
consecutive chunks, named `weights[3:5]` for the chunks 3 and 4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.snapshot.tensors import DTYPES, TensorSpec

ALIGNMENT: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tensor and its bytes `[start, end)` in the file."""

    spec: TensorSpec
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive chunks of a tensor, beginning with number `first`, and their bytes `[start, end)` in the file."""

    tensor: str
    first: int
    start: int
    end: int

    @property
    def count(self) -> int:
        return -(-(self.end - self.start) // CHUNK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A whole image: the bytes of its header, and its tensors in the order of the file.

    `places` are the tensors that are whole in the image, `pieces` the parts of other tensors.
    """

    header: bytes
    places: Mapping[str, Place]
    size_bytes: int
    pieces: tuple[Piece, ...] = ()


def lay_out(
    specs: Mapping[str, TensorSpec], *, partly: Mapping[str, Sequence[range]] | None = None
) -> Layout:
    """Return the layout of an image of the tensors of `specs`.

    `partly` has, for some tensors, ranges of chunk numbers: the image has only these chunks. There may be no range.
    """
    partly = partly or {}
    items = [_Item(tensor=name, spec=spec) for name, spec in specs.items() if name not in partly]
    items += [
        _Item(tensor=name, spec=specs[name], chunks=run) for name, runs in partly.items() for run in runs
    ]
    items.sort(key=lambda item: -DTYPES[item.spec.dtype].item_bytes)
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "writer": "strata"}}
    offset = 0
    for item in items:
        name = item.tensor if item.chunks is None else _free_name(item, specs)
        entries[name] = item.entry(offset)
        offset += item.size_bytes
    header = header_of(entries)
    places: dict[str, Place] = {}
    pieces: list[Piece] = []
    end = len(header)
    for item in items:
        start, end = end, end + item.size_bytes
        if item.chunks is None:
            places[item.tensor] = Place(spec=item.spec, start=start, end=end)
        else:
            pieces.append(Piece(tensor=item.tensor, first=item.chunks.start, start=start, end=end))
    return Layout(header=header, places=places, size_bytes=end, pieces=tuple(pieces))


def header_of(entries: Mapping[str, object]) -> bytes:
    """Return the header of a safetensors file, padded so that direct I/O can write the data after it."""
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    padding = -(8 + len(text)) % ALIGNMENT
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One tensor of the file: a whole tensor, or some `chunks` of a tensor."""

    tensor: str
    spec: TensorSpec
    chunks: range | None = None

    @property
    def size_bytes(self) -> int:
        if self.chunks is None:
            return self.spec.size_bytes
        return min(self.chunks.stop * CHUNK_BYTES, self.spec.size_bytes) - self.chunks.start * CHUNK_BYTES

    def entry(self, offset: int) -> dict[str, object]:
        dtype = DTYPES[self.spec.dtype]
        whole = self.chunks is None
        return {
            "dtype": dtype.safetensors if whole else "U8",
            "shape": [*self.spec.shape, *dtype.trailing] if whole else [self.size_bytes],
            "data_offsets": [offset, offset + self.size_bytes],
        }


def _free_name(item: _Item, specs: Mapping[str, TensorSpec]) -> str:
    """Return the name of a piece; vary it if a tensor has the same name."""
    assert item.chunks is not None
    name = f"{item.tensor}[{item.chunks.start}:{item.chunks.stop}]"
    while name in specs:
        name += "~"
    return name
