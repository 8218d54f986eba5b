"""The judge of roots after a crash: it must find each fault planted in a root."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from strata.checkpoint.format.marker import NAME as MARKER
from strata.client.checkpoints.manager import CheckpointManager
from tests.crashes.judge import SMALL_BYTES, complaints
from tests.crashes.program import STEPS, state_of

SIZE_BYTES = 4096


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root of a process that has saved two steps."""
    with CheckpointManager(tmp_path) as manager:
        for step in STEPS[:2]:
            manager.save_state(state_of(step, SIZE_BYTES), step)
    return tmp_path


def folder(root: Path, step: int) -> Path:
    (found,) = root.glob(f"step-{step:012d}-*")
    return found


def flip(root: Path) -> None:
    image = folder(root, STEPS[1]) / "rank-00000.safetensors"
    data = bytearray(image.read_bytes())
    data[-9] ^= 1
    image.write_bytes(data)


def forget_the_marker(root: Path) -> None:
    (folder(root, STEPS[1]) / MARKER).unlink()


def mark_half(root: Path) -> None:
    (folder(root, STEPS[1]) / "rank-00000.json").unlink()


def take_away(root: Path) -> None:
    shutil.rmtree(folder(root, STEPS[1]))


def leave_behind(root: Path) -> None:
    (root / "generations" / ".left.tmp").write_bytes(bytes(SMALL_BYTES))


def save_something_else(root: Path) -> None:
    with CheckpointManager(root) as manager:
        manager.save_state(state_of(7, SIZE_BYTES), STEPS[1])


def test_a_sound_root_is_found_sound(root: Path) -> None:
    assert list(complaints(root, [f"committed {step}" for step in STEPS[:2]], SIZE_BYTES)) == []


@pytest.mark.parametrize(
    ("spoil", "reported"),
    [
        (flip, "does not verify"),
        (forget_the_marker, "was told to be committed"),
        (mark_half, "is corrupt"),
        (take_away, "was told to be committed"),
        (leave_behind, "left the temporary files"),
        (save_something_else, "other values than were saved"),
    ],
)
def test_each_planted_fault_is_found(root: Path, spoil: Callable[[Path], None], reported: str) -> None:
    spoil(root)
    found = list(complaints(root, [f"committed {step}" for step in STEPS[:2]], SIZE_BYTES))
    assert any(reported in complaint for complaint in found), found


def test_a_marker_counts_as_soon_as_the_step_was_announced(root: Path) -> None:
    take_away(root)
    assert list(complaints(root, ["step marked"], SIZE_BYTES)) == []
    shutil.rmtree(root)
    assert any("was told" in each for each in complaints(root, ["step marked"], SIZE_BYTES))
