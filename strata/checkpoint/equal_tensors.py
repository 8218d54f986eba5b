"""Which tensors all ranks hold equal in one save: each rank decides it from the same messages.

Pure. The *fingerprint* of a tensor is of its name, kind, dtype, shape and bytes. A tensor is equal on
all ranks if every rank has sent its fingerprint. All ranks hear the same messages, stage by stage,
so all come to the same result.

    stage 0    how many there are, and one digest of all: if these are equal, so is every tensor, and that is all
    stage 1 …  all fingerprints, page by page

A message never exceeds the limit. What does not fit counts as different, which is always safe: each
rank then writes its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import xxhash

from strata.checkpoint.tensors import TensorSpec

LEAST_BYTES: Final = 64
"""Where messages are limited to less, in worlds of several thousand ranks, nothing is compared."""
FINGERPRINT_BYTES: Final = 8
MAX_PAGES: Final = 64

_ALL: Final = struct.Struct(">I16s")
_FILLED: Final = 0.8
"""How full a page is planned, since fingerprints do not fall into pages evenly."""


def fingerprint(name: str, spec: TensorSpec, digests: Sequence[str]) -> bytes:
    """Return what tells a tensor from every other: of its name, what it is, and its chunks' digests."""
    text = "\0".join((name, spec.kind, spec.dtype, repr(tuple(spec.shape)), *digests))
    return xxhash.xxh3_64_digest(text.encode())


class Comparison:
    """One rank's side of it: send `message`, `hear` what all ranks sent, until there is no message.

    `fingerprints` are this rank's, by name; `limit_bytes` is the longest message, alike on all ranks.
    """

    def __init__(self, fingerprints: Mapping[str, bytes], *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._own = dict(fingerprints)
        self._pages = 0
        self._done = False
        self.stage = 0
        self.equal: set[str] = set()
        """The names of the tensors that are known to be equal by now."""

    def message(self) -> bytes | None:
        """Return what to send at this stage; None when the comparison is over."""
        if self._done:
            return None
        if self.stage == 0:
            return _ALL.pack(len(self._own), _digest_of(self._own.values()))
        page = (one for one in self._own.values() if int.from_bytes(one) % self._pages == self.stage - 1)
        return b"".join(sorted(page)[: self._limit_bytes // FINGERPRINT_BYTES])

    def hear(self, told: Sequence[bytes]) -> None:
        """Go on to the next stage. `told` has the message of every rank at this one."""
        if self.stage > 0:
            common = frozenset.intersection(*(frozenset(_split(one)) for one in told))
            self.equal |= {name for name, one in self._own.items() if one in common}
        elif len(set(told)) == 1:
            self.equal |= self._own.keys()
        else:
            counts = [_ALL.unpack(one)[0] for one in told]
            if all(counts):  # a rank that has none shares none
                size_bytes = max(counts) * FINGERPRINT_BYTES
                self._pages = -(-size_bytes // max(1, int(self._limit_bytes * _FILLED)))
        self._done = self.stage >= min(self._pages, MAX_PAGES)
        self.stage += 1


def _digest_of(fingerprints: Iterable[bytes]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(sorted(fingerprints)))


def _split(message: bytes) -> list[bytes]:
    return [message[at : at + FINGERPRINT_BYTES] for at in range(0, len(message), FINGERPRINT_BYTES)]
