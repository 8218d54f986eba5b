"""etcd's own checksum of a snapshot: its last 32 bytes are the SHA-256 of the bytes before.

etcd ends a snapshot's stream with these 32 bytes, and `etcdutl snapshot restore` requires them. A stream that
was cut and a file with a flipped bit do not pass the check.
"""

from __future__ import annotations

import hashlib
from typing import Final

TRAILER_BYTES: Final = 32


class SnapshotDigest:
    """Digests a snapshot read once, in pieces of any size: etcd's checksum and the SHA-256 of the whole file."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._database = hashlib.sha256()
        self._tail = b""
        """The newest bytes, which may be the trailer."""

    def update(self, piece: bytes | memoryview) -> None:
        """Digest the next bytes."""
        self.size_bytes += len(piece)
        if len(piece) >= TRAILER_BYTES:
            self._database.update(self._tail)
            self._database.update(piece[:-TRAILER_BYTES])
            self._tail = bytes(piece[-TRAILER_BYTES:])
            return
        joined = self._tail + bytes(piece)
        self._database.update(joined[:-TRAILER_BYTES])
        self._tail = joined[-TRAILER_BYTES:]

    def fault(self) -> str:
        """Return why this is not a complete snapshot of etcd, in a few words; "" if it is one."""
        if self.size_bytes <= TRAILER_BYTES:
            return f"it has {self.size_bytes} bytes, too few for a database"
        if self._database.digest() != self._tail:
            return "its last 32 bytes are not the SHA-256 of the rest, as etcd writes them"
        return ""

    def sha256(self) -> str:
        """Return the SHA-256 of the whole file, the trailer included."""
        whole = self._database.copy()
        whole.update(self._tail)
        return whole.hexdigest()
