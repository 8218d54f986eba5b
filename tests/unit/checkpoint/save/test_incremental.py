from __future__ import annotations

import itertools

import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint.format.chunk_map import ChunkPlace
from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.format.entries import ImageRef, TensorEntry
from strata.checkpoint.format.image import lay_out
from strata.checkpoint.save.incremental import MAX_REFERENCES, compare, entries, rows
from strata.checkpoint.snapshot.tensors import TensorSpec

BASE = ImageRef(folder="step-1", image="i", size_bytes=10**12)
OLDER = ImageRef(folder="step-0", image="i", size_bytes=10**12)


def spec(chunks: int, rest: int = 0) -> TensorSpec:
    """Return a tensor spec of `chunks` whole chunks and a short one of `rest` bytes."""
    return TensorSpec(kind="numpy", dtype="int8", shape=(chunks * CHUNK_BYTES + rest,))


def saved(digests: str, image: ImageRef = BASE, *, first: int = 0) -> dict[int, ChunkPlace]:
    """Return the places of consecutive whole chunks; each letter of `digests` is one chunk's digest."""
    return {
        first + i: ChunkPlace(image=image, offset=4096 + i * CHUNK_BYTES, size_bytes=CHUNK_BYTES, digest=d)
        for i, d in enumerate(digests)
    }


def test_chunks_that_are_equal_are_kept_and_the_others_written() -> None:
    delta = compare({"t": spec(5)}, {"t": "abXYe"}, {"t": saved("abcde")})
    assert list(delta.kept["t"]) == [0, 1, 4]
    assert delta.partly == {"t": (range(2, 4),)}
    assert (delta.changed_bytes, delta.total_bytes) == (2 * CHUNK_BYTES, 5 * CHUNK_BYTES)
    assert delta.uses == {"step-1"}
    assert delta.worth_it


def test_a_tensor_that_changed_everywhere_is_written_whole() -> None:
    delta = compare({"t": spec(2), "u": spec(9)}, {"t": "xy", "u": "abcdefghi"}, {"u": saved("abcdefghi")})
    assert "t" not in delta.partly
    assert delta.partly == {"u": ()}


def test_a_short_chunk_is_not_taken_for_a_longer_one() -> None:
    """The chunks' digests are equal, but with the longer size in its manifest a restore would read too many bytes."""
    delta = compare({"t": spec(1, rest=3)}, {"t": "ab"}, {"t": saved("ab")})
    assert delta.partly == {"t": (range(1, 2),)}


EMPTY = TensorSpec(kind="numpy", dtype="int8", shape=(0,))


@pytest.mark.parametrize(
    ("specs", "digests", "base", "worth_it"),
    [
        ({"t": spec(10)}, "0123456789", saved("0123456789"), True),
        ({"t": spec(10)}, "xxxxxxx789", saved("0123456789"), True),
        ({"t": spec(10)}, "xxxxxxxx89", saved("0123456789"), False),
        ({"t": spec(10)}, "xxxxxxxxxx", saved("0123456789"), False),
        ({"t": spec(1)}, "a", {}, False),
        ({"t": EMPTY}, "", {}, False),
        ({}, "", {}, False),
    ],
)
def test_a_state_that_changed_too_much_is_saved_whole(
    specs: dict[str, TensorSpec], digests: str, base: dict[int, ChunkPlace], worth_it: bool
) -> None:
    delta = compare(specs, {"t": digests}, {"t": base})
    assert delta.worth_it is worth_it
    if not delta.changed_bytes:
        layout = lay_out(specs, partly=delta.partly)
        assert layout.size_bytes == len(layout.header)


@pytest.mark.parametrize(("count", "worth_it"), [(MAX_REFERENCES, True), (MAX_REFERENCES + 1, False)])
def test_a_state_spread_over_too_many_attempts_is_saved_whole(count: int, worth_it: bool) -> None:
    base = {
        f"t{i}": saved("a", ImageRef(folder=f"step-{i}", image="i", size_bytes=10**9)) for i in range(count)
    }
    delta = compare(dict.fromkeys(base, spec(1)), dict.fromkeys(base, "a"), base)
    assert len(delta.uses) == count
    assert delta.worth_it is worth_it


def test_a_rank_writes_only_its_share_of_replicated_tensors() -> None:
    specs = {"t": spec(6), "own": spec(1)}
    delta = compare(
        specs, {"t": "abcXef", "own": "n"}, {"t": saved("cd", first=2)}, {"t": range(2, 4)}, {"t": "abcdef"}
    )
    assert delta.partly == {"t": (range(3, 4),)}
    assert set(delta.kept["t"]) == {2}
    assert (delta.changed_bytes, delta.total_bytes) == (2 * CHUNK_BYTES, 7 * CHUNK_BYTES)


def test_a_rank_without_a_share_decides_as_the_others_do() -> None:
    specs, shares = {"t": spec(6)}, {"t": range(0)}
    alike = compare(specs, {"t": "abcXef"}, {}, shares, {"t": "abcdef"})
    assert alike.worth_it
    assert (alike.partly, alike.kept) == ({"t": ()}, {})
    assert not compare(specs, {"t": "ABCDEf"}, {}, shares, {"t": "abcdef"}).worth_it
    assert not compare(specs, {"t": "abcdef"}, {}, shares, {}).worth_it


@given(st.sets(st.integers(0, 30)))
def test_rows_cover_all_numbers_and_never_touch_each_other(numbers: set[int]) -> None:
    found = list(rows(sorted(numbers)))
    assert [n for row in found for n in row] == sorted(numbers)
    assert all(one.stop < other.start for one, other in itertools.pairwise(found))


# -- the resulting manifest --------------------------------------------------------------------


def located(entry: TensorEntry, files: tuple[ImageRef, ...]) -> list[tuple[str, int]]:
    """Return the place of each chunk: the folder ("" for the own image) and the offset."""
    return [("" if not file else files[file - 1].folder, offset) for _, file, offset in entry.located()]


def test_every_chunk_is_in_one_run_and_neighbours_share_theirs() -> None:
    specs = {"t": spec(6), "whole": spec(0, rest=8)}
    base = {"t": saved("abcdef") | saved("d", OLDER, first=3)}
    digests = {"t": "aXcdef", "whole": ("w",)}
    delta = compare(specs, digests, base)
    layout = lay_out(specs, partly=delta.partly)
    found, files = entries(layout, specs, digests, delta.kept, {})
    assert files == (BASE, OLDER)
    (piece,) = layout.pieces
    assert located(found["t"], files) == [
        ("step-1", 4096),
        ("", piece.start),
        ("step-1", 4096 + 2 * CHUNK_BYTES),
        ("step-0", 4096),
        ("step-1", 4096 + 4 * CHUNK_BYTES),
        ("step-1", 4096 + 5 * CHUNK_BYTES),
    ]
    assert [run.count for run in found["t"].runs or ()] == [1, 1, 1, 1, 2]
    assert found["whole"].runs is None
    assert found["whole"].end - found["whole"].start == 8


# -- the image ----------------------------------------------------------------------------------


def test_an_image_of_pieces_is_a_safetensors_file() -> None:
    specs = {
        "w": TensorSpec(kind="torch", dtype="float32", shape=(CHUNK_BYTES,)),
        "w[1:2]": TensorSpec(kind="torch", dtype="int8", shape=(3,)),
        "same": spec(1),
    }
    layout = lay_out(specs, partly={"w": (range(1, 2), range(3, 4)), "same": ()})
    pieces = {(piece.first, piece.count): piece.end - piece.start for piece in layout.pieces}
    assert pieces == {(1, 1): CHUNK_BYTES, (3, 1): CHUNK_BYTES}
    read = safetensors.numpy.load(layout.header + bytes(layout.size_bytes - len(layout.header)))
    assert {name: (str(array.dtype), array.shape) for name, array in read.items()} == {
        "w[1:2]": ("int8", (3,)),
        "w[1:2]~": ("uint8", (CHUNK_BYTES,)),
        "w[3:4]": ("uint8", (CHUNK_BYTES,)),
    }


def test_the_last_piece_of_a_tensor_is_as_short_as_its_chunk() -> None:
    layout = lay_out({"t": spec(2, rest=7)}, partly={"t": (range(1, 3),)})
    (piece,) = layout.pieces
    assert (piece.count, piece.end - piece.start) == (2, CHUNK_BYTES + 7)
    assert layout.size_bytes == len(layout.header) + CHUNK_BYTES + 7
