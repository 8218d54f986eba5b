"""One flipped bit anywhere: a restore must detect and name it, and restore the previous checkpoint instead."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.restore.verify import verify
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.kv.records import CheckpointType
from strata.errors import CheckpointCorrupt
from tests.not_none import not_none

FLIPS = 1000


def a_state(step: int) -> dict[str, Any]:
    seeded = np.random.default_rng(step)
    return {
        "model": {"w": seeded.random((64, 64)), "b": seeded.random(7).astype(np.float16)},
        "optim": {"m": seeded.random(500).astype(np.float32), "empty": np.zeros(0), "raw": b"opaque"},
        "step": step,
    }


def restored_by(manager: CheckpointManager) -> tuple[int, dict[str, Any]]:
    """Return the step that is restored, and its state."""
    state: dict[str, Any] = {"model": {}, "optim": {}, "step": None}
    return not_none(manager.restore(state)).step, state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(np.array_equal(one, other)) and type(one) is type(other)


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(bit // 8)
            byte = file.read(1)[0]
            file.seek(bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))

    flip()
    try:
        yield
    finally:
        flip()


def test_a_thousand_flipped_bits_are_all_found_and_the_previous_checkpoint_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="strata.checkpoint")  # the test causes a thousand errors
    root, seeded = tmp_path / "root", random.Random(5)
    with CheckpointManager(root) as manager:
        for step in (20, 40):
            manager.save_state(a_state(step), step).wait()
    newest = next(root.glob("step-*40-*"))
    files = sorted(newest.iterdir())
    assert len(files) == 4, "an image, its manifest, the global one, the marker"
    storage, found_by_verify, manager = LocalStorage(root, nonce=lambda: ""), 0, CheckpointManager(root)
    for number in range(FLIPS):
        # every second flip is in the image, which has most of the bytes
        path = files[number // 2 % 4] if number % 2 else newest / "rank-00000.safetensors"
        bit = seeded.randrange(8 * path.stat().st_size)
        with flipped(path, bit):
            step, state = restored_by(manager)
            assert step == 20, (path.name, bit)
            assert same(state, a_state(20)), (path.name, bit)
            verification = verify(storage, newest.name, manifest_digest=None)
            assert not verification.good, (path.name, bit)
            found_by_verify += path.name in " ".join(verification.problems)
    assert found_by_verify == FLIPS, "each names the file"
    step, state = restored_by(manager)
    assert step == 40, "with every bit back in its place it is good again"
    assert same(state, a_state(40))


def test_a_flip_in_a_base_image_is_detected_in_the_incremental_that_uses_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="strata.checkpoint")
    seeded = random.Random(6)
    with CheckpointManager(tmp_path) as manager:
        manager.save_state(a_state(10), 10).wait()
        manager.save_state(a_state(20), 20).wait()
        newer = {**a_state(20), "optim": a_state(30)["optim"], "step": 30}
        manager.save_state(newer, 30, checkpoint_type=CheckpointType.INCREMENTAL).wait()
    base = next(tmp_path.glob("step-*20-gen*")) / "rank-00000.safetensors"
    folder = next(tmp_path.glob("step-*30-gen*")).name
    storage, manager = LocalStorage(tmp_path, nonce=lambda: ""), CheckpointManager(tmp_path)
    found = Counter[int]()
    for _ in range(100):
        bit = seeded.randrange(8 * base.stat().st_size)
        with flipped(base, bit):
            step, state = restored_by(manager)
            good = verify(storage, folder, manifest_digest=None).good
            assert step == (30 if good else 10), "20 has lost the bit in any case"
            assert same(state, newer if good else a_state(10)), bit
            found[step] += 1
    assert min(found[10], found[30]) > 10, "the model is used, the header and the optimizer are not"


def test_nothing_is_restored_if_no_checkpoint_is_good(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save_state(a_state(20), 20).wait()
        image = next(tmp_path.glob("step-*/*.safetensors"))
        with flipped(image, 8 * (image.stat().st_size - 1)):
            state: dict[str, Any] = {"step": None}
            with pytest.raises(CheckpointCorrupt, match="none of the checkpoints is good"):
                manager.restore(state)
            assert state == {"step": None}, "nothing was changed"
