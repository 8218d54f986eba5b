"""The members of a world are written in chunks, and adopted by the head that is written last.

Chunks lie under (generation, epoch), so those of another leader's attempt are never adopted
(PROTOCOLS 6.1). An earlier attempt of the *same* leader lies in the same folder, and one of its
transactions may still be on the way. So the head's transaction compares the whole folder: each
chunk it adopts unwritten is compared one by one, and nothing may have come since the view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from strata.core.job import JobView
from strata.core.records import Member, MembersChunk, encode
from strata.core.txn import (
    Compare,
    Delete,
    Put,
    Txn,
    none_in,
    none_newer_in,
    unchanged,
)

T = TypeVar("T")

MAX_CHUNK_MEMBERS = 400
MAX_CHUNK_BYTES = 56 * 1024
MAX_OPS = 100
"""PROTOCOLS 2.5; etcd itself refuses more than 128."""
MAX_BYTES = 900 * 1024
"""Of the values in one transaction, which leaves room for keys and compares below 1 MiB."""
_FIXED_BYTES = 120
"""Of a member as JSON, beside its name, with every number as long as it can be."""


def chunks_of(members: Sequence[Member]) -> list[bytes]:
    """Return the encoded chunks, each of at most 400 members and well below a value's limit."""
    parts = _batches(
        members,
        lambda member: _FIXED_BYTES + len(member.worker),
        most=MAX_CHUNK_MEMBERS,
        most_bytes=MAX_CHUNK_BYTES,
    )
    return [encode(MembersChunk(members=tuple(part))) for part in parts]


def write_members(
    job: JobView,
    *,
    generation: int,
    epoch: int,
    chunks: Sequence[bytes],
    guards: Sequence[Compare],
    last: Txn,
) -> tuple[Txn, ...]:
    """Return what makes `chunks` the members of (generation, epoch), and then `last`, the head.

    If everything fits into one transaction that is the answer. Else the answer is only what is
    missing of the chunks, each under `guards`; the next plan finds them in the view.
    """
    view, folder = job.view, job.keys.members(generation, epoch)
    there = {kv.key: kv for kv in view.walk(folder)}
    wanted = {job.keys.members_chunk(generation, epoch, index): value for index, value in enumerate(chunks)}
    kept = [kv for key, kv in there.items() if wanted.get(key) == kv.value]
    puts = [
        Put(key=key, value=value)
        for key, value in wanted.items()
        if key not in there or there[key].value != value
    ]
    writes: list[Put | Delete] = [*(Delete(key=key) for key in there if key not in wanted), *puts]
    size = sum(map(_value_bytes, writes))
    if len(writes) + len(last.success) <= MAX_OPS and size <= MAX_BYTES:
        folder_is_known = none_newer_in(folder, view.revision) if there else none_in(folder)
        adopted = (unchanged(kv.key, kv.mod_revision) for kv in kept)
        return (last.and_if(folder_is_known, *adopted).then(*writes),)
    parts = _batches(writes, _value_bytes, most=MAX_OPS, most_bytes=MAX_BYTES)
    return tuple(Txn(compares=tuple(guards), success=tuple(part)) for part in parts)


def _value_bytes(write: Put | Delete) -> int:
    return len(write.value) if isinstance(write, Put) else 0


def _batches(
    items: Iterable[T], bytes_of: Callable[[T], int], *, most: int, most_bytes: int
) -> Iterator[list[T]]:
    """Yield the items in their order, so many at once, and of so many bytes unless one alone has more."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and (len(batch) == most or size + bytes_of(item) > most_bytes):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += bytes_of(item)
    if batch:
        yield batch
