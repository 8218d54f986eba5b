from __future__ import annotations

import numpy as np
import pytest

from strata.checkpoint.format.digest import CHUNK_BYTES, digest
from strata.checkpoint.format.manifest import GLOBAL_NAME
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.restore.verify import Verification, verify
from strata.errors import CheckpointError
from tests.unit.checkpoint.ranks import Ranks
from tests.unit.checkpoint.saves import Saved

STATE = {
    "big": np.arange(CHUNK_BYTES // 8 + 100, dtype=np.float64),
    "small": np.arange(7, dtype=np.int16),
    "lr": 0.1,
}


class Verified(Saved):
    def __init__(self) -> None:
        super().__init__(STATE)
        self.read: list[int] = []

    def verify(self, digest: str | None = None) -> Verification:
        return verify(self.storage, self.folder, manifest_digest=digest, on_bytes=self.read.append)

    def change(self, file: str, offset: int) -> None:
        self.storage.flip(self.name(file), offset)


def test_an_intact_checkpoint_is_read_to_its_last_byte_and_reported_good() -> None:
    saved = Verified()
    found = saved.verify()
    image = saved.storage.objects[f"{saved.folder}/rank-00000.safetensors"]
    assert (found.good, found.marked) == (True, True)
    assert found.read_bytes == sum(saved.read) == len(image)
    assert found.manifest is not None
    assert found.manifest.identity.step == 20


def test_verify_reports_every_damaged_chunk() -> None:
    saved = Verified()
    for offset in (100, 4096, 4096 + CHUNK_BYTES):
        saved.change("rank-00000.safetensors", offset)
    saved.change("rank-00000.safetensors", -1)
    header, *_ = saved.verify().problems
    assert "the header differs" in header
    saved.change("rank-00000.safetensors", 100)
    first, second, third = saved.verify().problems
    assert "tensor big" in first
    assert "tensor big" in second
    assert "tensor small" in third
    assert f"bytes 4096 to {4096 + CHUNK_BYTES}" in first


@pytest.mark.parametrize("file", [GLOBAL_NAME, "rank-00000.json", MARKER, "rank-00000.safetensors"])
def test_a_file_that_is_missing_or_changed_is_named(file: str) -> None:
    saved = Verified()
    saved.change(file, 9)
    assert file in " ".join(saved.verify().problems)
    del saved.storage.objects[f"{saved.folder}/{file}"]
    if file == MARKER:
        assert "its save never ended" in saved.verify().problems[0]
        known = saved.verify(saved.checkpoint.manifest_digest)
        assert (known.good, known.marked) == (True, False), "the catalog knows that it is committed"
    else:
        assert f"{file} is missing" in " ".join(saved.verify().problems)


def test_a_manifest_other_than_the_catalogs_is_a_problem() -> None:
    saved = Verified()
    problems = saved.verify("xxh3-128:" + "0" * 32).problems
    assert "names another checkpoint than the catalog" in problems[0]
    assert "differs from the committed one" in problems[1]


def test_a_newer_format_is_not_damage() -> None:
    saved = Verified()
    name = f"{saved.folder}/{MARKER}"
    body = saved.storage.objects[name]
    newer = body.partition(b', "self"')[0].replace(b'"version": 1', b'"version": 9') + b"}"
    saved.storage.objects[name] = newer[:-1] + f', "self": "{digest(newer)}"}}'.encode()
    with pytest.raises(CheckpointError, match="has format 9"):
        saved.verify()


def test_a_tensor_written_by_several_ranks_is_read_and_reported_once() -> None:
    ranks = Ranks(2)
    states = [{"same": STATE["big"], "mine": np.full(3, rank)} for rank in range(2)]
    ranks.save(states=states, paths=[["same"]] * 2)
    storage, folder, digest = ranks.near, ranks.folder, ranks.record.manifest_digest
    images = [f"{folder}/rank-{rank:05d}.safetensors" for rank in range(2)]
    found = verify(storage, folder, manifest_digest=digest)
    assert found.good
    assert found.read_bytes == sum(len(storage.objects[image]) for image in images)
    for image in images:
        storage.flip(image, -1)
        (problem,) = verify(storage, folder, manifest_digest=digest).problems
        assert image in problem
        storage.flip(image, -1)
    del storage.objects[images[1]]
    assert images[1] in " ".join(verify(storage, folder, manifest_digest=digest).problems)
