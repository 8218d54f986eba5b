"""etcd's SHA-256 at the end of a snapshot, for any sizes of the pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import pytest

from strata.controlplane.snapshot import SnapshotDigest

DATABASE = bytes(range(256)) * 40
SNAPSHOT = DATABASE + hashlib.sha256(DATABASE).digest()


def digest_of(pieces: Iterable[bytes]) -> SnapshotDigest:
    digest = SnapshotDigest()
    for piece in pieces:
        digest.update(piece)
    return digest


@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 64, 4096, len(DATABASE), len(SNAPSHOT)])
def test_a_snapshot_in_pieces_of_any_size_is_whole(length: int) -> None:
    pieces = [SNAPSHOT[start : start + length] for start in range(0, len(SNAPSHOT), length)]
    digest = digest_of(pieces)
    assert digest.fault() == ""
    assert digest.size_bytes == len(SNAPSHOT)
    assert digest.sha256() == hashlib.sha256(SNAPSHOT).hexdigest()


def test_an_empty_piece_changes_nothing() -> None:
    assert digest_of([b"", SNAPSHOT[:50], b"", SNAPSHOT[50:], b""]).fault() == ""


@pytest.mark.parametrize("missing", [1, 31, 32, 33, 4096, len(SNAPSHOT) - 33])
def test_a_truncated_snapshot_is_found(missing: int) -> None:
    assert "SHA-256" in digest_of([SNAPSHOT[:-missing]]).fault()


@pytest.mark.parametrize("at", [0, 1, 5000, len(DATABASE) - 1, len(DATABASE), len(SNAPSHOT) - 1])
def test_a_flipped_bit_is_found(at: int) -> None:
    flipped = bytearray(SNAPSHOT)
    flipped[at] ^= 1
    assert "SHA-256" in digest_of([bytes(flipped)]).fault()


@pytest.mark.parametrize("data", [b"", b"x", SNAPSHOT[-32:], hashlib.sha256(b"").digest()])
def test_an_empty_database_is_not_a_snapshot(data: bytes) -> None:
    assert "too few" in digest_of([data]).fault()
