from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from strata.checkpoint.format.digest import CHUNK_BYTES, named_digest
from strata.checkpoint.format.manifest import GLOBAL_NAME, ImageRef, Manifest, RankManifest, Run
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.format.marker import committed, read_manifest, write_marker
from strata.checkpoint.restore.reader import Loaded, load
from strata.errors import CheckpointCorrupt, CheckpointError
from tests.unit.checkpoint.ranks import Ranks
from tests.unit.checkpoint.saves import Saved, save

STATE = {
    "big": np.arange(CHUNK_BYTES // 8 + 100, dtype=np.float64),
    "small": np.arange(7, dtype=np.int16),
    "raw": b"opaque bytes",
    "plain": {"lr": 0.1, "name": "x"},
}


def test_a_saved_state_is_restored_and_its_marker_alone_proves_the_commit() -> None:
    saved = Saved(STATE)
    back = saved.value()
    assert np.array_equal(back["big"], STATE["big"])  # type: ignore[arg-type]  # an array
    assert (back["raw"], back["plain"]) == (b"opaque bytes", {"lr": 0.1, "name": "x"})
    proof = committed(saved.storage, saved.folder)
    assert proof == (saved.load().manifest, saved.checkpoint.manifest_digest)
    del saved.storage.objects[saved.name(MARKER)]
    assert committed(saved.storage, saved.folder) is None


@pytest.mark.parametrize("file", [GLOBAL_NAME, "rank-00000.json", MARKER])
def test_every_flipped_bit_of_a_document_is_found(file: str) -> None:
    saved = Saved({"a": np.ones(2), "b": 1})
    name = saved.name(file)
    for at, bit in itertools.product(range(saved.storage.size(name)), range(8)):
        saved.storage.flip(name, at, bit)
        with pytest.raises(CheckpointError):
            committed(saved.storage, saved.folder)
        saved.storage.flip(name, at, bit)


def test_flipped_bits_of_every_region_of_an_image_are_found() -> None:
    saved = Saved(STATE)
    name, seeded = saved.name("rank-00000.safetensors"), random.Random(20)
    size = saved.storage.size(name)
    assert saved.load().manifest.parts[0].image_bytes == size
    second = range(4096 + CHUNK_BYTES, 4096 + CHUNK_BYTES + 800)
    regions = {
        range(8): "header",
        range(8, 4096): "header",
        range(4096, size): "",
        range(size - 40, size): "",
    }
    for region, message in {**regions, second: r"tensor big differs .* \(chunk 1\)"}.items():
        for _ in range(6):
            at, bit = seeded.choice(region), seeded.randrange(8)
            saved.storage.flip(name, at, bit)
            with pytest.raises(CheckpointCorrupt, match=rf"rank-00000\.safetensors.*{message}"):
                saved.load()
            saved.storage.flip(name, at, bit)
    saved.load()


@pytest.mark.parametrize("file", [GLOBAL_NAME, "rank-00000.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("harm", ["missing", "truncated", "longer", "empty", "exchanged"])
def test_a_file_that_is_not_the_one_saved_is_found(file: str, harm: str) -> None:
    saved, other = Saved(STATE), Saved({"big": np.zeros(5)})
    name = saved.name(file)
    data = saved.storage.objects[name]
    changed = {
        "missing": None,
        "truncated": data[:-1],
        "longer": data + b"\0",
        "empty": b"",
        "exchanged": other.storage.objects[other.name(file)],
    }[harm]
    if changed is None:
        del saved.storage.objects[name]
    else:
        saved.storage.objects[name] = changed
    for look in (saved.load, lambda: committed(saved.storage, saved.folder)):
        with pytest.raises(CheckpointCorrupt, match=file.replace(".", r"\.")):
            look()


def test_rewriting_a_marker_yields_the_same_bytes_and_refuses_another_checkpoint() -> None:
    saved = Saved(STATE)
    marker = saved.storage.objects.pop(saved.name(MARKER))
    manifest = read_manifest(saved.storage, saved.folder, saved.checkpoint.manifest_digest)
    for _ in range(2):
        write_marker(saved.storage, saved.folder, manifest, saved.checkpoint.manifest_digest)
        assert saved.storage.objects[saved.name(MARKER)] == marker
    with pytest.raises(CheckpointCorrupt, match="another checkpoint"):
        write_marker(saved.storage, saved.folder, manifest, named_digest(b"other"))


def test_the_predecessor_is_the_previous_commit() -> None:
    saved = Saved(STATE)
    save(saved.storage, saved.catalog, {"a": 1}, 40)
    manifests = [
        Manifest.from_bytes(data, what=name)
        for name, data in sorted(saved.storage.objects.items())
        if name.endswith(GLOBAL_NAME)
    ]
    first = saved.checkpoint
    assert [m.predecessor for m in manifests] == [None, (20, first.generation, first.id)]


# -- other sizes of the world -----------------------------------------------------------------


def test_an_old_rank_gets_its_own_part_and_an_added_rank_the_differing_keys() -> None:
    ranks = Ranks(2)
    alike = {"model": np.ones(2), "lr": 0.1}
    own = [{"seen": [1, 2], "mine": np.zeros(3)}, {"seen": [1, 3], "mine": np.ones(3), "only": None}]
    ranks.save(states=[alike | each for each in own])
    beyond, second = ranks.loaded(2), ranks.loaded(1)
    assert (beyond.own, beyond.differing) == (False, ("seen.1", "mine", "only"))
    assert (second.own, second.differing) == (True, ())
    assert second.saved.value(second.saved.tree)["mine"].tolist() == [1, 1, 1]


# -- chunks in other images ---------------------------------------------------------------------


def rewritten(saved: Saved, change: Callable[[RankManifest], RankManifest]) -> Callable[[], Loaded]:
    """Change the rank's manifest of a checkpoint; return a function that loads it with the new digests."""
    part, whole = saved.name("rank-00000.json"), saved.name(GLOBAL_NAME)
    data = change(RankManifest.from_bytes(saved.storage.objects[part], what="m")).to_bytes()
    manifest = Manifest.from_bytes(saved.storage.objects[whole], what="m")
    named = dataclasses.replace(manifest.parts[0], digest=named_digest(data))
    manifest = dataclasses.replace(manifest, parts=(named,))
    saved.storage.objects |= {part: data, whole: manifest.to_bytes()}
    digest = named_digest(manifest.to_bytes())
    return lambda: load(saved.storage, saved.folder, manifest_digest=digest, rank=0)


def moved_to(image: ImageRef) -> Callable[[RankManifest], RankManifest]:
    """Return a change that places the second chunk of `big` at offset 5 of `image`."""

    def change(manifest: RankManifest) -> RankManifest:
        big = manifest.tensors["big"]
        runs = (
            Run(first=0, count=1, file=0, offset=big.start),
            Run(first=1, count=1, file=1, offset=5),
        )
        entry = dataclasses.replace(big, start=0, end=0, runs=runs)
        return dataclasses.replace(manifest, files=(image,), tensors={**manifest.tensors, "big": entry})

    return change


def second_chunk_elsewhere() -> tuple[Saved, Callable[[], Loaded], str]:
    """Return a checkpoint, the function that loads it, and the name of the object with its second chunk."""
    saved = Saved(STATE)
    tail = STATE["big"].tobytes()[CHUNK_BYTES:]  # type: ignore[attr-defined]  # an array
    image = ImageRef(folder="step-0", image="other", size_bytes=len(tail) + 5)
    saved.storage.objects["step-0/other"] = b"12345" + tail
    own = saved.storage.objects[saved.name("rank-00000.safetensors")]
    zeroed = own[: 4096 + CHUNK_BYTES] + bytes(len(tail)) + own[4096 + CHUNK_BYTES + len(tail) :]
    saved.storage.objects[saved.name("rank-00000.safetensors")] = zeroed
    return saved, rewritten(saved, moved_to(image)), "step-0/other"


def test_a_chunk_is_read_from_the_image_it_lies_in() -> None:
    _, look, _ = second_chunk_elsewhere()
    loaded = look()
    back = loaded.saved.value(loaded.saved.tree)
    assert np.array_equal(back["big"], STATE["big"])  # type: ignore[arg-type]  # an array
    assert np.array_equal(back["small"], STATE["small"])  # type: ignore[arg-type]  # an array


@pytest.mark.parametrize("harm", ["missing", "truncated", "longer", "flipped"])
def test_damage_to_an_image_of_an_earlier_attempt_is_found(harm: str) -> None:
    saved, look, name = second_chunk_elsewhere()
    objects = saved.storage.objects
    if harm == "flipped":
        saved.storage.flip(name, 5)
    elif harm == "missing":
        del objects[name]
    else:
        objects[name] = objects[name][:-1] if harm == "truncated" else objects[name] + b"\0"
    with pytest.raises(CheckpointCorrupt, match=name):
        look()
