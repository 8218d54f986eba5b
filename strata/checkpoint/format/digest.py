"""The checksum of stored bytes: xxh3-128 over chunks of 8 MiB; each tensor begins a new chunk.

The digest detects accidents (a flipped bit, a torn write, a mixed-up file), not forgery.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import xxhash

ALGORITHM: Final = "xxh3-128"
CHUNK_BYTES: Final = 8 << 20

Bytes = bytes | bytearray | memoryview


def digest(data: Bytes) -> str:
    """Return the digest of `data` in hexadecimal; the document that contains it names the algorithm."""
    return xxhash.xxh3_128_hexdigest(data)


def named_digest(data: Bytes) -> str:
    """Return the digest of `data` with the algorithm's name; the catalog names documents by such digests."""
    return f"{ALGORITHM}:{digest(data)}"


def chunks(data: memoryview) -> Iterator[memoryview]:
    """Yield `data` in pieces of `CHUNK_BYTES`; the last may be shorter, none is empty."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]
