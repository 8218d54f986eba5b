from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint.manifest import (
    Identity,
    Manifest,
    Part,
    RankManifest,
    TensorEntry,
    model_hash,
)
from strata.checkpoint.marker import Marker
from strata.checkpoint.tensors import DTYPES, TensorSpec
from strata.errors import CheckpointCorrupt, CheckpointError

_counts = st.integers(0, 2**53)
_names = st.text(min_size=1, max_size=8)
_identities = st.builds(
    Identity, step=_counts, generation=_counts, attempt=_names, world_size=_counts, epoch=_counts
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
    return TensorEntry(spec=spec, start=start, end=start + spec.size_bytes, chunks=chunks)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=5,
)
_rank_manifests = st.builds(
    RankManifest,
    identity=_identities,
    rank=_counts,
    image=_names,
    image_bytes=_counts,
    header_bytes=_counts,
    header_digest=_names,
    tensors=st.dictionaries(_names, _entries(), max_size=4),
    tree=_json,
    rng=_json,
)
_manifests = st.builds(
    Manifest,
    identity=_identities,
    parts=st.lists(
        st.builds(Part, rank=_counts, manifest=_names, digest=_names, image=_names, image_bytes=_counts),
        max_size=4,
    ).map(tuple),
    model_hash=_names,
    created_unix_ms=_counts,
    metadata=st.dictionaries(_names, st.text(), max_size=3),
    predecessor=st.none() | st.tuples(_counts, _counts, _names),
)
_markers = st.builds(
    Marker,
    step=_counts,
    generation=_counts,
    attempt=_names,
    manifest_digest=_names,
    predecessor=st.none() | st.tuples(_counts, _counts, _names),
)


@given(_rank_manifests)
def test_a_rank_manifest_reads_as_it_was_written(manifest: RankManifest) -> None:
    assert RankManifest.from_bytes(manifest.to_bytes(), what="m") == manifest


@given(_manifests)
def test_a_manifest_reads_as_it_was_written(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes(), what="m") == manifest


@given(_markers)
def test_a_marker_reads_as_it_was_written(marker: Marker) -> None:
    assert Marker.from_bytes(marker.to_bytes(), what="m") == marker


@given(_markers, st.data())
def test_no_bit_of_a_marker_may_differ(marker: Marker, data: st.DataObject) -> None:
    written = bytearray(marker.to_bytes())
    bit = data.draw(st.integers(0, 8 * len(written) - 1))
    written[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CheckpointError):
        Marker.from_bytes(bytes(written), what="m")


def rank_manifest(**tensors: tuple[str, ...]) -> RankManifest:
    """A manifest of int8 tensors of one byte with the given digests."""
    spec = TensorSpec(kind="torch", dtype="int8", shape=(1,))
    return RankManifest(
        identity=Identity(step=1, generation=1, attempt="a", world_size=1),
        rank=0,
        image="i",
        image_bytes=0,
        header_bytes=0,
        header_digest="",
        tensors={
            name.replace("_", "."): TensorEntry(spec=spec, start=0, end=1, chunks=chunks)
            for name, chunks in tensors.items()
        },
        tree=None,
        rng=None,
    )


def test_a_manifest_of_a_newer_format_is_refused_with_the_reason() -> None:
    body: dict[str, Any] = json.loads(rank_manifest().to_bytes())
    body["version"] = 2
    with pytest.raises(CheckpointError, match="format 2, and this release reads up to 1") as caught:
        RankManifest.from_bytes(json.dumps(body).encode(), what="m")
    assert not isinstance(caught.value, CheckpointCorrupt)


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
def test_what_is_no_manifest_is_corrupt(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"file\.json cannot be read"):
        RankManifest.from_bytes(data, what="file.json")


@pytest.mark.parametrize(
    "change", [{"dtype": "int99"}, {"range": [0, 2]}, {"chunks": []}, {"shape": [2]}, {"range": [1]}]
)
def test_a_tensor_that_contradicts_itself_is_corrupt(change: dict[str, Any]) -> None:
    body = json.loads(rank_manifest(a=("d",)).to_bytes())
    body["tensors"]["a"] |= change
    with pytest.raises(CheckpointCorrupt):
        RankManifest.from_bytes(json.dumps(body).encode(), what="m")


def test_the_model_hash_is_of_the_weights_alone() -> None:
    one = model_hash(rank_manifest(model_w=("1",), optim_m=("2",), __rng____t=("3",)))
    assert one == model_hash(rank_manifest(model_w=("1",), optim_m=("9",)))
    assert one != model_hash(rank_manifest(model_w=("9",), optim_m=("2",)))
    whole = model_hash(rank_manifest(bytes=("1",)))
    assert whole != model_hash(rank_manifest(bytes=("2",)))
    assert whole.startswith("xxh3-128:")
