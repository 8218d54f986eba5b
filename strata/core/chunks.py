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
    Operation,
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


def parts_of(
    items: Iterable[T], size: Callable[[T], int], *, most_bytes: int, most: int | None = None
) -> Iterator[list[T]]:
    """Divide items, in their order, into parts of at most `most`, and of `most_bytes` unless one item alone is larger."""
    part: list[T] = []
    part_bytes = 0
    for item in items:
        item_bytes = size(item)
        if part and (len(part) == most or part_bytes + item_bytes > most_bytes):
            yield part
            part, part_bytes = [], 0
        part.append(item)
        part_bytes += item_bytes
    if part:
        yield part


def chunks_of(members: Sequence[Member]) -> list[bytes]:
    """Return the encoded chunks, each of at most 400 members and well below a value's limit."""
    parts = parts_of(
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
    writes: list[Operation] = [*(Delete(key=key) for key in there if key not in wanted), *puts]
    if len(writes) + len(last.success) <= MAX_OPS and sum(map(_value_bytes, writes)) <= MAX_BYTES:
        folder_is_known = none_newer_in(folder, view.revision) if there else none_in(folder)
        adopted = (unchanged(kv.key, kv.mod_revision) for kv in kept)
        return (last.and_if(folder_is_known, *adopted).then(*writes),)
    parts = parts_of(writes, _value_bytes, most=MAX_OPS, most_bytes=MAX_BYTES)
    return tuple(Txn(compares=tuple(guards), success=tuple(part)) for part in parts)


def _value_bytes(write: Operation) -> int:
    return len(write.value) if isinstance(write, Put) else 0
