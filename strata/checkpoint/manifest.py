"""The JSON beside the images: what each file holds, and the digests that prove it.

A rank's manifest lists its tensors with the digest of every chunk, its header's digest and the
tree of its state. The global manifest lists the ranks' manifests by digest, so that its own digest
(in the catalog's record and in the COMMIT marker) stands for every byte of the checkpoint.

Readers ignore fields they do not know, and refuse a newer `version` than theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strata.checkpoint.digest import ALGORITHM, CHUNK_BYTES, named_digest
from strata.checkpoint.state import Json
from strata.checkpoint.tensors import DTYPES, TensorSpec
from strata.errors import CheckpointCorrupt, CheckpointError

VERSION: Final = 1
GLOBAL_NAME: Final = "manifest.json"


def image_name(rank: int) -> str:
    """Return the name of a rank's image in its attempt's folder."""
    return f"rank-{rank:05d}.safetensors"


def rank_manifest_name(rank: int) -> str:
    """Return the name of a rank's manifest in its attempt's folder."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which save a manifest belongs to."""

    step: int
    generation: int
    attempt: str
    world_size: int
    epoch: int = 0
    type: str = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor's bytes `[start, end)` of the image, and the digest of each of their chunks."""

    spec: TensorSpec
    start: int
    end: int
    chunks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """What one rank saved."""

    identity: Identity
    rank: int
    image: str
    image_bytes: int
    header_bytes: int
    header_digest: str
    tensors: Mapping[str, TensorEntry]
    tree: Json
    rng: Json

    def to_bytes(self) -> bytes:
        return _write(
            "strata-rank-manifest",
            {
                **_plain_identity(self.identity),
                "rank": self.rank,
                "digest": ALGORITHM,
                "chunk_bytes": CHUNK_BYTES,
                "image": {
                    "file": self.image,
                    "size_bytes": self.image_bytes,
                    "header_bytes": self.header_bytes,
                    "header_digest": self.header_digest,
                },
                "tensors": {
                    name: {
                        "kind": entry.spec.kind,
                        "dtype": entry.spec.dtype,
                        "shape": list(entry.spec.shape),
                        "range": [entry.start, entry.end],
                        "chunks": list(entry.chunks),
                    }
                    for name, entry in self.tensors.items()
                },
                "tree": self.tree,
                "rng": self.rng,
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, what: str) -> RankManifest:
        """Return the manifest that `data` holds; `what` names it in errors."""
        body = read_document("strata-rank-manifest", data, what=what)
        with as_corrupt(what):
            image = body["image"]
            return cls(
                identity=_identity(body),
                rank=int(body["rank"]),
                image=str(image["file"]),
                image_bytes=int(image["size_bytes"]),
                header_bytes=int(image["header_bytes"]),
                header_digest=str(image["header_digest"]),
                tensors={name: _tensor(entry) for name, entry in body["tensors"].items()},
                tree=body["tree"],
                rng=body["rng"],
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's share: the digest of its manifest, and the size of its image."""

    rank: int
    manifest: str
    digest: str
    image: str
    image_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint. `predecessor` is (step, generation, attempt) of the one before it."""

    identity: Identity
    parts: tuple[Part, ...]
    model_hash: str
    created_unix_ms: int
    metadata: Mapping[str, str]
    predecessor: tuple[int, int, str] | None

    @property
    def size_bytes(self) -> int:
        return sum(part.image_bytes for part in self.parts)

    def to_bytes(self) -> bytes:
        return _write(
            "strata-manifest",
            {
                **_plain_identity(self.identity),
                "digest": ALGORITHM,
                "created_unix_ms": self.created_unix_ms,
                "size_bytes": self.size_bytes,
                "model_hash": self.model_hash,
                "metadata": dict(self.metadata),
                "predecessor": list(self.predecessor) if self.predecessor else None,
                "ranks": [
                    {
                        "rank": part.rank,
                        "manifest": part.manifest,
                        "digest": part.digest,
                        "image": part.image,
                        "image_bytes": part.image_bytes,
                    }
                    for part in self.parts
                ],
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, what: str) -> Manifest:
        """Return the manifest that `data` holds; `what` names it in errors."""
        body = read_document("strata-manifest", data, what=what)
        with as_corrupt(what):
            before = body["predecessor"]
            return cls(
                identity=_identity(body),
                parts=tuple(Part(**{f: p[f] for f in Part.__slots__}) for p in body["ranks"]),
                model_hash=str(body["model_hash"]),
                created_unix_ms=int(body["created_unix_ms"]),
                metadata=dict(body["metadata"]),
                predecessor=(int(before[0]), int(before[1]), str(before[2])) if before else None,
            )


def model_hash(manifest: RankManifest) -> str:
    """Return a fingerprint of the weights: equal for equal tensors, whenever they were saved.

    It covers the tensors below the key `model`; when there is none, every tensor of the state.
    """
    chosen = {n: e for n, e in manifest.tensors.items() if n == "model" or n.startswith("model.")}
    if not chosen:
        chosen = {n: e for n, e in manifest.tensors.items() if not n.startswith("__rng__")}
    lines = [
        f"{name}\0{entry.spec.dtype}\0{list(entry.spec.shape)}\0{','.join(entry.chunks)}"
        for name, entry in sorted(chosen.items())
    ]
    return named_digest("\n".join(lines).encode("utf-8", "surrogatepass"))


# -- documents --------------------------------------------------------------------------------


def read_document(kind: str, data: bytes, *, what: str) -> dict[str, Any]:
    """Return the JSON object of this kind; `CheckpointCorrupt` when it is none.

    `CheckpointError` when a newer version of Strata wrote it.
    """
    with as_corrupt(what):
        body = json.loads(data)
        if body["format"] != kind:
            raise ValueError(f"it is a {body['format']!r}")
        version = int(body["version"])
    if version > VERSION:
        raise CheckpointError(
            f"{what} has format {version}, and this release reads up to {VERSION}",
            hint="read it with the release that wrote it, or a newer one",
        )
    return dict(body)


def _write(kind: str, body: dict[str, Json]) -> bytes:
    document = {"format": kind, "version": VERSION, **body}
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _plain_identity(identity: Identity) -> dict[str, Json]:
    return {name: getattr(identity, name) for name in Identity.__slots__}


def _identity(body: Mapping[str, Any]) -> Identity:
    return Identity(**{name: body[name] for name in Identity.__slots__})


def _tensor(entry: Mapping[str, Any]) -> TensorEntry:
    spec = TensorSpec(kind=entry["kind"], dtype=entry["dtype"], shape=tuple(entry["shape"]))
    start, end = entry["range"]
    if spec.dtype not in DTYPES:
        raise ValueError(f"the dtype {spec.dtype!r} is unknown")
    if end - start != spec.size_bytes or len(entry["chunks"]) != -(-spec.size_bytes // CHUNK_BYTES):
        raise ValueError(f"a tensor {spec} cannot lie in {start}..{end}")
    return TensorEntry(spec=spec, start=start, end=end, chunks=tuple(entry["chunks"]))


class as_corrupt:  # noqa: N801  # reads as the statement it is
    """Turn what a malformed document makes Python raise into `CheckpointCorrupt`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | TypeError | KeyError | AttributeError | IndexError):
            raise CheckpointCorrupt(f"{self._what} cannot be read: {error}") from error
