"""The differences between two checkpoints as the user sees the state, whatever worlds saved them. No tensor is read.

The checkpoints are compared rank by rank and path by path, for the ranks that both worlds have. A tensor that several
ranks saved in parts counts as one whole tensor. If both checkpoints have a tensor in the same parts, the digests of its
chunks decide; otherwise only its bytes can decide, and `element_diff` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from strata.checkpoint.format.manifest import RankManifest
from strata.checkpoint.restore.diff import text_of
from strata.checkpoint.restore.global_tensors import GlobalTensor, Piece
from strata.checkpoint.restore.reader import check_refers, tensors_of
from strata.checkpoint.save.sharding import Box, Shape
from strata.checkpoint.snapshot.state import Json, leaves, named_by


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainValue:
    """A value that is no tensor. `exact` is equal for values that are equal to the last bit; `text` is for people."""

    exact: str
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTensor:
    """A tensor with the digests of its parts' chunks; equal objects are tensors of equal bits, whoever saved them."""

    dtype: str
    shape: Shape
    parts: tuple[tuple[Box, tuple[str, ...]], ...]
    stored: GlobalTensor = field(compare=False)

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, self.parts[:1]))  # thousands of ranks may each have a part

    def __str__(self) -> str:
        return str(self.stored.spec)


Value = PlainValue | WholeTensor
Values = Mapping[str, Value]
"""The values of one rank, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The values of both checkpoints at one path, on `ranks`; None: that checkpoint has no value there.

    `ranks` is empty if the pair is the same on all compared ranks. `same` is None if only the tensors' bytes can decide.
    """

    path: str
    a: Value | None
    b: Value | None
    ranks: tuple[int, ...]
    same: bool | None

    @property
    def size_bytes(self) -> int:
        """The number of bytes to read from both checkpoints, to compare the pair element by element."""
        return sum(v.stored.spec.size_bytes for v in (self.a, self.b) if isinstance(v, WholeTensor))


class Ranks:
    """The manifests of the ranks that saved the checkpoint in `folder`."""

    def __init__(self, folder: str, manifests: Sequence[RankManifest]) -> None:
        """`CheckpointCorrupt` if the parts of a tensor do not fit together, or if a state names a missing tensor."""
        self.manifests = manifests
        parted = tensors_of(folder, manifests)
        for manifest in manifests:
            check_refers(folder, manifest, parted)
        self._parted = {name: self._whole(tensor) for name, tensor in parted.items()}

    def values(self, tree: Json, rank: int, *, path: str = "") -> dict[str, Value]:
        """Return the values of `tree`, a part of the manifest of `rank`, by path; `path` is the tree's own."""
        return dict(self._values(tree, rank, path))

    def _values(self, tree: Json, rank: int, path: str) -> Iterator[tuple[str, Value]]:
        for at, leaf in leaves(tree, path):
            name = named_by(leaf)
            if name is None:
                yield at, PlainValue(exact=repr(leaf), text=text_of(leaf))
            else:
                yield at or name, self._parted.get(name) or self._own(rank, name)

    def _own(self, rank: int, name: str) -> WholeTensor:
        spec = self.manifests[rank].tensors[name].spec
        return self._whole(
            GlobalTensor(spec=spec, pieces=(Piece(box=Box.whole(spec.shape), rank=rank, name=name),))
        )

    def _whole(self, tensor: GlobalTensor) -> WholeTensor:
        parts = ((p.box, self.manifests[p.rank].tensors[p.name].chunks) for p in tensor.pieces)
        return WholeTensor(
            dtype=tensor.spec.dtype,
            shape=tensor.shape,
            parts=tuple(sorted((part for part in parts if part[0].count), key=lambda part: part[0].offsets)),
            stored=tensor,
        )


def compare(a: Sequence[Values], b: Sequence[Values]) -> list[Pair]:
    """Return the pairs of two checkpoints, whose ranks have these values, in the order of the paths.

    A path has several pairs if its pair differs between the ranks.
    """
    ranks = range(min(len(a), len(b)))
    paths = dict.fromkeys(path for rank in ranks for values in (a[rank], b[rank]) for path in values)
    return [pair for path in paths for pair in _pairs(path, ranks, a, b)]


def _pairs(path: str, ranks: range, a: Sequence[Values], b: Sequence[Values]) -> Iterator[Pair]:
    found: dict[tuple[Value | None, Value | None], list[int]] = {}
    for rank in ranks:
        if path in a[rank] or path in b[rank]:
            found.setdefault((a[rank].get(path), b[rank].get(path)), []).append(rank)
    for (one, other), on in found.items():
        yield Pair(
            path=path,
            a=one,
            b=other,
            ranks=() if len(on) == len(ranks) else tuple(on),
            same=_same(one, other),
        )


def _same(a: Value | None, b: Value | None) -> bool | None:
    if a == b:
        return True
    if not (isinstance(a, WholeTensor) and isinstance(b, WholeTensor)):
        return False
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    boxes = [[box for box, _ in tensor.parts] for tensor in (a, b)]
    return False if boxes[0] == boxes[1] else None
