"""Which tensors are equal on all ranks in one save: each rank computes the answer from the same messages.

Pure. The *fingerprint* of a tensor is a hash of its name, kind, dtype, shape and bytes. A tensor is equal on all
ranks if every rank has sent the same fingerprint for it. All ranks receive the same messages, stage by stage, so all
compute the same result.

    stage 0    one digest of all fingerprints: if all ranks have the same digest, every tensor is equal: done
    stage 1    a digest and a count for each group of names: which groups differ
    stage 2 …  the fingerprints in the groups that differ, page by page

A message never exceeds the limit. Fingerprints that do not fit count as different. This is always safe: each
rank then writes its own tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import xxhash

from strata.checkpoint.snapshot.tensors import TensorSpec

LEAST_BYTES: Final = 64
"""With a smaller message limit, as in worlds of several thousand ranks, nothing is compared."""
FINGERPRINT_BYTES: Final = 8
MAX_PAGES: Final = 64
"""The maximum number of stages after the first two."""

_ALL: Final = struct.Struct(">I16s")
_GROUP: Final = struct.Struct(">H8s")
_MAX_COUNT: Final = 0xFFFF
_FILLED: Final = 0.8
"""The planned fill of a page: less than 1, since hashing does not spread fingerprints over pages evenly."""


def fingerprint(name: str, spec: TensorSpec, digests: Sequence[str]) -> bytes:
    """Return the fingerprint of a tensor: a hash of its name, kind, dtype, shape and chunk digests."""
    text = "\0".join((name, spec.kind, spec.dtype, repr(tuple(spec.shape)), *digests))
    return xxhash.xxh3_64_digest(text.encode())


class Comparison:
    """One rank's side of the comparison.

    Until `message()` is None, the caller sends it to all ranks, and passes the messages of all ranks to `receive`.

    `fingerprints` are this rank's, by name. `limit_bytes` is the longest message, the same on all ranks.
    """

    def __init__(self, fingerprints: Mapping[str, bytes], *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._left = dict(fingerprints)
        self._groups = max(1, limit_bytes // _GROUP.size)
        self._pages = 0
        self._done = False
        self.stage = 0
        self.equal: set[str] = set()
        """The names of the tensors known to be equal so far."""

    def message(self) -> bytes | None:
        """Return the message to send at this stage, or None when the comparison is over."""
        if self._done:
            return None
        if self.stage == 0:
            return _ALL.pack(len(self._left), _digest_of(self._left.values()))
        if self.stage == 1:
            return b"".join(
                _GROUP.pack(min(len(group), _MAX_COUNT), _digest_of(group)[: _GROUP.size - 2])
                for group in self._grouped()
            )
        return b"".join(self._page())

    def receive(self, messages: Sequence[bytes]) -> None:
        """Go to the next stage; `messages` has every rank's message of the current stage."""
        if self.stage == 0:
            self._receive_all(messages)
        elif self.stage == 1:
            self._receive_groups(messages)
        else:
            self._receive_page(messages)
        self.stage += 1
        if self.stage >= 2 + min(self._pages, MAX_PAGES) and self.stage > 1:
            self._done = True

    def _receive_all(self, messages: Sequence[bytes]) -> None:
        if len(set(messages)) == 1:
            self._settle(self._left)
            self._done = True
        elif any(_ALL.unpack(one)[0] == 0 for one in messages):
            self._done = True  # a rank has no tensor to compare, so none is equal on all ranks

    def _receive_groups(self, messages: Sequence[bytes]) -> None:
        by_group = zip(*(list(_GROUP.iter_unpack(one)) for one in messages), strict=True)
        differ, bound = [], 0
        for number, entries in enumerate(by_group):
            if len(set(entries)) > 1:
                differ.append(number)
                bound += max(count for count, _ in entries)
        differing = frozenset(differ)
        self._settle([name for name in self._left if self._group(name) not in differing])
        self._pages = -(-bound * FINGERPRINT_BYTES // max(1, int(self._limit_bytes * _FILLED)))

    def _receive_page(self, messages: Sequence[bytes]) -> None:
        common = frozenset.intersection(*(frozenset(_split(one)) for one in messages))
        self._settle([name for name, one in self._left.items() if one in common])

    def _page(self) -> list[bytes]:
        number = self.stage - 2
        here = (one for one in self._left.values() if int.from_bytes(one) % self._pages == number)
        return sorted(here)[: self._limit_bytes // FINGERPRINT_BYTES]

    def _settle(self, names: Iterable[str]) -> None:
        """Record these tensors as equal; the others are still to be compared."""
        for name in tuple(names):
            self.equal.add(name)
            del self._left[name]

    def _group(self, name: str) -> int:
        return xxhash.xxh3_64_intdigest(name.encode()) % self._groups

    def _grouped(self) -> list[list[bytes]]:
        groups: list[list[bytes]] = [[] for _ in range(self._groups)]
        for name, one in self._left.items():
            groups[self._group(name)].append(one)
        return groups


def _digest_of(fingerprints: Iterable[bytes]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(sorted(fingerprints)))


def _split(message: bytes) -> list[bytes]:
    return [message[at : at + FINGERPRINT_BYTES] for at in range(0, len(message), FINGERPRINT_BYTES)]
