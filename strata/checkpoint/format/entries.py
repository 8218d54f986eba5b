"""One tensor in a rank's manifest: its type and shape, the digest of each chunk, and the chunks' places.

A tensor is stored in one of three ways:

* whole, as the bytes `[start, end)` of the rank's own image;
* in `runs` of consecutive chunks, each in the rank's own image or in an image of an earlier attempt (an
  Incremental); the manifest's `files` name those images. Every chunk is in one run, so a restore follows no chain of
  manifests;
* `replicated`: in runs, too, but a chunk may be in no run. Then the chunk is in another rank's image. That rank's
  manifest has the tensor under the same name and with the same digests.

A tensor with a `shard` is a part of a larger tensor; `offsets` are its first indices in the larger tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.snapshot.tensors import DTYPES, TensorSpec
from strata.documents.parsing import MAX_INTEGER, shown, text, whole

KINDS: Final = frozenset({"torch", "numpy", "bytes"})
MAX_DIMENSIONS: Final = 64
"""The limit of JAX, torch and NumPy."""
OWN: Final = 0
"""The file number of a rank's own image. A file number n above 0 means the n-th of the manifest's `files`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The place of a part in a larger tensor.

    `tensor` names the larger tensor; if `tensor` is empty, the part has the same name. A rank may have several parts.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` chunks of a tensor, beginning with number `first`, stored consecutively from byte `offset` of `file`."""

    first: int
    count: int
    file: int
    offset: int

    @property
    def end(self) -> int:
        """The last chunk's number plus 1."""
        return self.first + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef:
    """An image, and its attempt's folder; that folder and the referring attempt's folder have the same parent."""

    folder: str
    image: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor, the digest of each chunk, and the chunks' places: `[start, end)`, or `runs` if set."""

    spec: TensorSpec
    chunks: tuple[str, ...]
    start: int = 0
    end: int = 0
    runs: tuple[Run, ...] | None = None
    replicated: bool = False
    shard: Shard | None = None

    def chunk_bytes(self, number: int) -> int:
        """Return the size of chunk `number`; the last one may be shorter."""
        return min(CHUNK_BYTES, self.spec.size_bytes - number * CHUNK_BYTES)

    @property
    def located_bytes(self) -> int:
        """The number of the tensor's bytes that this rank's manifest locates."""
        if self.runs is None:
            return self.end - self.start
        return sum(self._run_bytes(run) for run in self.runs)

    def _run_bytes(self, run: Run) -> int:
        return (run.count - 1) * CHUNK_BYTES + self.chunk_bytes(run.end - 1)

    def located(self) -> Iterator[tuple[int, int, int]]:
        """Yield (number, file, offset) of each chunk that this rank's manifest locates, in order."""
        runs = self.runs
        if runs is None:
            runs = (Run(first=0, count=len(self.chunks), file=OWN, offset=self.start),)
        for run in runs:
            for number in range(run.first, run.end):
                yield number, run.file, run.offset + (number - run.first) * CHUNK_BYTES

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "kind": self.spec.kind,
            "dtype": self.spec.dtype,
            "shape": list(self.spec.shape),
        }
        if self.runs is None:
            body["range"] = [self.start, self.end]
        else:
            body["runs"] = [[run.first, run.count, run.file, run.offset] for run in self.runs]
        if self.replicated:
            body["replicated"] = True
        if self.shard is not None:
            body["shard"] = {
                "global_shape": list(self.shard.global_shape),
                "offsets": list(self.shard.offsets),
                **({"tensor": self.shard.tensor} if self.shard.tensor else {}),
            }
        body["chunks"] = list(self.chunks)
        return body

    @classmethod
    def from_json(cls, body: Mapping[str, Any], *, sizes: Sequence[int]) -> TensorEntry:
        """Return the entry; `sizes` are the sizes of its files, by file number. `ValueError` if invalid."""
        spec = TensorSpec(kind=body["kind"], dtype=body["dtype"], shape=_dimensions(body["shape"]))
        if spec.kind not in KINDS:
            raise ValueError(f"a tensor of {shown(spec.kind)} is unknown")
        if spec.dtype not in DTYPES:
            raise ValueError(f"the dtype {shown(spec.dtype)} is unknown")
        if spec.size_bytes > MAX_INTEGER:
            raise ValueError("a tensor is larger than any can be")
        shard = body.get("shard")
        start, end = body["range"] if "runs" not in body else (0, 0)
        chunks = tuple(body["chunks"])
        if not all(type(chunk) is str for chunk in chunks):
            raise ValueError("a digest is no text")
        entry = cls(
            spec=spec,
            chunks=chunks,
            start=whole(start),
            end=whole(end),
            runs=tuple(_run(run) for run in body["runs"]) if "runs" in body else None,
            replicated=bool(body.get("replicated", False)),
            shard=None
            if shard is None
            else Shard(
                global_shape=_dimensions(shard["global_shape"]),
                offsets=_dimensions(shard["offsets"]),
                tensor=text(shard.get("tensor", "")),
            ),
        )
        entry._check(sizes)
        return entry

    def _check(self, sizes: Sequence[int]) -> None:
        if len(self.chunks) != -(-self.spec.size_bytes // CHUNK_BYTES):
            raise ValueError(f"a tensor {self.spec} has no {len(self.chunks)} chunks")
        if self.runs is None and (self.end - self.start != self.spec.size_bytes or self.end > sizes[OWN]):
            raise ValueError(
                f"a tensor {self.spec} cannot lie in {self.start}..{self.end} of {sizes[OWN]} bytes"
            )
        known = 0
        for run in self.runs or ():
            if run.first < known or run.count < 1 or run.end > len(self.chunks):
                raise ValueError(f"a tensor of {len(self.chunks)} chunks has none in {run}")
            if run.first > known and not self.replicated:
                raise ValueError(f"chunk {known} lies nowhere")
            if not (run.file < len(sizes) and run.offset <= sizes[run.file] - self._run_bytes(run)):
                raise ValueError(f"no file has {run}")
            known = run.end
        if self.runs is not None and known < len(self.chunks) and not self.replicated:
            raise ValueError(f"chunk {known} lies nowhere")
        if self.shard is not None:
            _check_shard(self.spec, self.shard)


def _run(body: Sequence[int]) -> Run:
    first, count, file, offset = body
    return Run(first=whole(first), count=whole(count), file=whole(file), offset=whole(offset))


def _dimensions(body: Sequence[int]) -> tuple[int, ...]:
    """Return lengths or offsets of at most `MAX_DIMENSIONS` dimensions; `ValueError` for anything else."""
    found = tuple(body)
    if len(found) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor has {len(found)} dimensions")
    for n in found:
        if type(n) is not int or not 0 <= n <= MAX_INTEGER:
            raise ValueError(f"a tensor cannot have {shown(n)} in a dimension")
    return found


def _check_shard(spec: TensorSpec, shard: Shard) -> None:
    fits = all(
        0 <= offset <= whole - length
        for whole, offset, length in zip(shard.global_shape, shard.offsets, spec.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"a tensor {spec} is no part of {shard}")
