from __future__ import annotations

import dataclasses

import pytest

from strata.checkpoint.format.chunk_map import ChunkPlace, chunk_places, object_name
from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.format.entries import ImageRef, Run, TensorEntry
from strata.checkpoint.format.manifest import Identity, RankManifest
from strata.checkpoint.snapshot.tensors import TensorSpec
from strata.errors import CheckpointCorrupt

SPEC = TensorSpec(kind="torch", dtype="int8", shape=(2 * CHUNK_BYTES + 5,))
DIGESTS = ("a", "b", "c")
EARLIER = ImageRef(folder="step-1", image="rank-00000.safetensors", size_bytes=9)


def of_rank(rank: int, entry: TensorEntry, *files: ImageRef) -> RankManifest:
    return RankManifest(
        identity=Identity(step=2, generation=1, attempt="a", world_size=2),
        rank=rank,
        image=f"rank-{rank}",
        image_bytes=100 + rank,
        header_bytes=0,
        header_digest="",
        tensors={"t": entry},
        tree=None,
        rng=None,
        files=files,
    )


def own(rank: int) -> ImageRef:
    return ImageRef(folder="step-2", image=f"rank-{rank}", size_bytes=100 + rank)


def place(image: ImageRef, offset: int, number: int) -> ChunkPlace:
    size_bytes = 5 if number == 2 else CHUNK_BYTES
    return ChunkPlace(image=image, offset=offset, size_bytes=size_bytes, digest=DIGESTS[number])


WHOLE = TensorEntry(spec=SPEC, start=64, end=64 + SPEC.size_bytes, chunks=DIGESTS)
RUNS = (Run(first=0, count=2, file=1, offset=8), Run(first=2, count=1, file=0, offset=0))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (WHOLE, [(own(0), 64), (own(0), 64 + CHUNK_BYTES), (own(0), 64 + 2 * CHUNK_BYTES)]),
        (
            TensorEntry(spec=SPEC, runs=RUNS, chunks=DIGESTS),
            [(EARLIER, 8), (EARLIER, 8 + CHUNK_BYTES), (own(0), 0)],
        ),
    ],
)
def test_chunks_lie_where_their_entry_places_them(
    entry: TensorEntry, expected: list[tuple[ImageRef, int]]
) -> None:
    (places,) = chunk_places("job/step-2", [of_rank(0, entry, EARLIER)], 0).values()
    assert places == tuple(place(image, offset, n) for n, (image, offset) in enumerate(expected))


def share(*runs: Run) -> TensorEntry:
    return TensorEntry(spec=SPEC, runs=runs, chunks=DIGESTS, replicated=True)


FIRST_HALF = share(Run(first=0, count=2, file=0, offset=8))
SECOND_HALF = share(Run(first=2, count=1, file=0, offset=16))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replicated_tensor_is_put_together_from_all_ranks(rank: int) -> None:
    manifests = [of_rank(0, FIRST_HALF), of_rank(1, SECOND_HALF)]
    (places,) = chunk_places("step-2", manifests, rank).values()
    assert places == (place(own(0), 8, 0), place(own(0), 8 + CHUNK_BYTES, 1), place(own(1), 16, 2))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (share(), "no rank has chunk 2 of tensor t"),
        (dataclasses.replace(SECOND_HALF, replicated=False), "no rank has chunk 2 of tensor t"),
        (dataclasses.replace(SECOND_HALF, chunks=("a", "b", "x")), "different values .* tensor t"),
    ],
)
def test_an_incomplete_replicated_tensor_is_corrupt(other: TensorEntry, words: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=words):
        chunk_places("step-2", [of_rank(0, FIRST_HALF), of_rank(1, other)], 0)


def test_attempts_lie_in_sibling_folders() -> None:
    assert object_name("step-2", EARLIER) == "step-1/rank-00000.safetensors"
    assert object_name("job/step-2", EARLIER) == "job/step-1/rank-00000.safetensors"
