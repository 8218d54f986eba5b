from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.format.manifest import (
    Identity,
    ImageRef,
    Manifest,
    Part,
    RankManifest,
    Run,
    Shard,
    TensorEntry,
    model_hash,
    rank_manifest_name,
    sealed,
)
from strata.checkpoint.format.marker import Marker
from strata.checkpoint.snapshot.tensors import DTYPES, TensorSpec
from strata.documents.parsing import MAX_UNIX_MS
from strata.errors import CheckpointCorrupt, CheckpointError

_counts = st.integers(0, 2**53)
_names = st.text(min_size=1, max_size=8)
_files = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
_ranks = st.integers(0, 10**6)
_images = st.builds(ImageRef, folder=_files, image=_files, size_bytes=st.integers(2**53, 2**54))
_identities = st.builds(
    Identity,
    step=_counts,
    generation=_counts,
    attempt=_files,
    world_size=st.integers(1, 10**6),
    epoch=_counts,
)


@st.composite
def _entries(draw: st.DrawFn) -> TensorEntry:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    spec = TensorSpec(
        kind=draw(st.sampled_from(["torch", "numpy", "bytes"])),
        dtype=dtype,
        shape=tuple(draw(st.lists(st.integers(0, 5), max_size=3))),
    )
    start = draw(_counts)
    chunks = ("d" * 32,) if spec.size_bytes else ()
    whole = tuple(n + draw(st.integers(0, 3)) for n in spec.shape)
    shard = Shard(global_shape=whole, offsets=(0,) * len(whole)) if draw(st.booleans()) else None
    if draw(st.booleans()):
        return TensorEntry(spec=spec, start=start, end=start + spec.size_bytes, chunks=chunks, shard=shard)
    replicated = draw(st.booleans())
    runs = tuple(Run(first=0, count=1, file=0, offset=start) for _ in chunks)
    if replicated and draw(st.booleans()):
        runs = ()
    return TensorEntry(spec=spec, runs=runs, chunks=chunks, replicated=replicated, shard=shard)


_plain = st.none() | st.booleans() | st.integers() | st.text()
_trees = st.recursive(
    _plain
    | st.builds(lambda name: {"t": name}, _names)
    | st.just({"f": "nan"})
    | st.just({"s": ["int8", "ff"]}),
    lambda inner: (
        st.builds(lambda parts: {"l": parts}, st.lists(inner, max_size=3))
        | st.builds(
            lambda items: {"d": items, "c": "dict"},
            st.lists(st.tuples(_plain | st.just({"u": [1, "a"]}), inner).map(list), max_size=3),
        )
        | st.builds(lambda part: {"d": [], "c": "ordered", "m": part}, inner)
    ),
    max_leaves=5,
)
_rank_manifests = st.builds(
    RankManifest,
    identity=_identities,
    rank=_ranks,
    image=_files,
    image_bytes=st.integers(2**53 + 100000, 2**54),
    header_bytes=st.integers(0, 10**8),
    header_digest=_names,
    tensors=st.dictionaries(_names, _entries(), max_size=4),
    tree=_trees,
    rng=_trees,
    files=st.lists(_images, max_size=2).map(tuple),
    mesh=st.dictionaries(_names, st.tuples(_counts, _counts), max_size=2),
)


@st.composite
def _manifests(draw: st.DrawFn) -> Manifest:
    parts = tuple(
        Part(
            rank=rank,
            manifest=rank_manifest_name(rank),
            digest=draw(_names),
            image=draw(_files),
            image_bytes=draw(_counts),
        )
        for rank in range(draw(st.integers(1, 4)))
    )
    return Manifest(
        identity=dataclasses.replace(draw(_identities), world_size=len(parts)),
        parts=parts,
        model_hash=draw(_names),
        created_unix_ms=draw(st.integers(0, MAX_UNIX_MS)),
        metadata=draw(st.dictionaries(_names, st.text(), max_size=3)),
        predecessor=draw(st.none() | st.tuples(_counts, _counts, _files)),
        uses=draw(st.lists(_files, max_size=2).map(tuple)),
    )


_markers = st.builds(
    Marker,
    step=_counts,
    generation=_counts,
    attempt=_files,
    manifest_digest=_names,
    predecessor=st.none() | st.tuples(_counts, _counts, _files),
)


@given(_rank_manifests | _manifests() | _markers)
def test_a_document_reads_as_it_was_written(document: RankManifest | Manifest | Marker) -> None:
    assert type(document).from_bytes(document.to_bytes(), what="m") == document


@given(_markers, st.data())
def test_every_flipped_bit_of_a_marker_is_found(marker: Marker, data: st.DataObject) -> None:
    written = bytearray(marker.to_bytes())
    bit = data.draw(st.integers(0, 8 * len(written) - 1))
    written[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CheckpointError):
        Marker.from_bytes(bytes(written), what="m")


def rank_manifest(**tensors: tuple[str, ...]) -> RankManifest:
    """Return a manifest of one-byte int8 tensors with the given digests."""
    spec = TensorSpec(kind="torch", dtype="int8", shape=(1,))
    return RankManifest(
        identity=Identity(step=1, generation=1, attempt="a", world_size=1),
        rank=0,
        image="i",
        image_bytes=16,
        header_bytes=0,
        header_digest="",
        tensors={
            name.replace("_", "."): TensorEntry(spec=spec, start=0, end=1, chunks=chunks)
            for name, chunks in tensors.items()
        },
        tree=None,
        rng=None,
    )


def a_marker() -> Marker:
    return Marker(step=1, generation=1, attempt="a", manifest_digest="d", predecessor=None)


@pytest.mark.parametrize("document", [rank_manifest(), a_marker()])
def test_a_document_of_a_newer_format_is_refused_with_the_reason(document: RankManifest | Marker) -> None:
    body: dict[str, Any] = json.loads(document.to_bytes()) | {"version": 2}
    body.pop("self", None)
    with pytest.raises(CheckpointError, match="format 2, and this release reads up to 1") as caught:
        type(document).from_bytes(sealed(body), what="m")
    assert not isinstance(caught.value, CheckpointCorrupt)


SPEC_OF_THREE = TensorSpec(kind="torch", dtype="int8", shape=(2 * CHUNK_BYTES + 5,))
OTHER_IMAGE = ImageRef(folder="step-1", image="i", size_bytes=CHUNK_BYTES)


def of_three_chunks(**changes: Any) -> dict[str, Any]:
    """Return the document of a tensor of three chunks; the first chunk is in an earlier attempt's image."""
    runs = (Run(first=0, count=1, file=1, offset=0), Run(first=1, count=2, file=0, offset=4096))
    entry = TensorEntry(spec=SPEC_OF_THREE, runs=runs, chunks=("a", "b", "c"))
    manifest = dataclasses.replace(
        rank_manifest(), image_bytes=4096 + CHUNK_BYTES + 5, files=(OTHER_IMAGE,), tensors={"t": entry}
    )
    body: dict[str, Any] = json.loads(manifest.to_bytes())
    if "range" in changes:
        del body["tensors"]["t"]["runs"]
    body["tensors"]["t"] |= changes
    return body


def test_chunks_are_located_by_their_runs() -> None:
    entry = RankManifest.from_bytes(json.dumps(of_three_chunks()).encode(), what="m").tensors["t"]
    assert list(entry.located()) == [(0, 1, 0), (1, 0, 4096), (2, 0, 4096 + CHUNK_BYTES)]
    assert [entry.chunk_bytes(number) for number in range(3)] == [CHUNK_BYTES, CHUNK_BYTES, 5]


@pytest.mark.parametrize(
    "change",
    [
        {"runs": [[0, 1, 1, 0]]},
        {"runs": [[1, 2, 0, 4096]]},
        {"runs": [[0, 1, 1, 0], [2, 1, 0, 4096]]},
        {"runs": [[0, 1, 1, 0], [0, 3, 0, 4096]]},
        {"runs": [[0, 1, 1, 0], [1, 3, 0, 4096]]},
        {"runs": [[0, 1, 1, 0], [1, 0, 0, 4096], [1, 2, 0, 4096]]},
        {"runs": [[0, 1, 1, 1], [1, 2, 0, 4096]]},
        {"runs": [[0, 1, 2, 0], [1, 2, 0, 4096]]},
        {"runs": [[0, 1, -1, 0], [1, 2, 0, 4096]]},
        {"runs": [[0, 1, 1, 0], [1, 2, 0, 4097]]},
        {"runs": [[0, 1, 1, -1], [1, 2, 0, 4096]]},
        {"runs": [[0, 1, 1]]},
        {"shard": {"global_shape": [2], "offsets": [0]}},
        {"shard": {"global_shape": [2 * CHUNK_BYTES + 9], "offsets": [5]}},
        {"shard": {"global_shape": [2 * CHUNK_BYTES + 9], "offsets": [-1]}},
        {"shard": {"global_shape": [], "offsets": []}},
        {"dtype": "int99"},
        {"range": [0, 2]},
        {"range": [1]},
        {"chunks": []},
        {"shape": [2]},
    ],
)
def test_a_tensor_that_contradicts_itself_is_corrupt(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointCorrupt, match="m cannot be read"):
        RankManifest.from_bytes(json.dumps(of_three_chunks(**change)).encode(), what="m")


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/b", "/etc/passwd"])
@pytest.mark.parametrize("field", [0, 1])
def test_the_name_of_a_file_in_another_attempt_cannot_escape_its_folder(name: str, field: int) -> None:
    body = of_three_chunks()
    body["files"][0][field] = name
    with pytest.raises(CheckpointCorrupt, match="no name of a file"):
        RankManifest.from_bytes(json.dumps(body).encode(), what="m")


def test_unknown_fields_are_ignored() -> None:
    manifest = rank_manifest(a=("d",))
    body = json.loads(manifest.to_bytes())
    body["later"] = body["tensors"]["a"]["later"] = 1
    assert RankManifest.from_bytes(json.dumps(body).encode(), what="m") == manifest


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"format":"strata-manifest","version":1}',
        b'{"format":"strata-rank-manifest","version":"x"}',
        b'{"format":"strata-rank-manifest","version":1}',
    ],
)
def test_a_document_that_is_no_rank_manifest_is_corrupt(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"file\.json cannot be read"):
        RankManifest.from_bytes(data, what="file.json")


def test_the_model_hash_is_of_the_weights_alone() -> None:
    one = model_hash([rank_manifest(model_w=("1",), optim_m=("2",), __rng____t=("3",))])
    assert one == model_hash([rank_manifest(model_w=("1",), optim_m=("9",))])
    assert one != model_hash([rank_manifest(model_w=("9",), optim_m=("2",))])
    whole = model_hash([rank_manifest(bytes=("1",))])
    assert whole != model_hash([rank_manifest(bytes=("2",))])
    assert whole.startswith("xxh3-128:")
