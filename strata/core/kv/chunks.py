"""The members of a world, written in chunks that the world's head adopts; the head is written last.

The keys of chunks contain generation and epoch, so a leader never adopts chunks of another leader (PROTOCOLS 6.1).
An earlier write by the *same* leader uses the same folder, and a transaction of that write may still be in flight.
Two rules follow:
1. Before the head is written, chunks are only put, never deleted.
2. The head's transaction compares that no chunk was written after the view, and deletes surplus chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from strata.core.job import JobView
from strata.core.kv.records import Member, MembersChunk, encode
from strata.core.kv.txn import Compare, Delete, Operation, Put, Txn, none_newer_in, prefix_end

T = TypeVar("T")

MAX_CHUNK_MEMBERS = 400
MAX_CHUNK_BYTES = 56 * 1024
MAX_OPS = 100
"""The limit of operations in one transaction (PROTOCOLS 2.5); etcd itself refuses more than 128."""
MAX_BYTES = 900 * 1024
"""The limit for the values in one transaction: the rest of 1 MiB is left for keys and compares."""
_FIXED_BYTES = 120
"""Upper bound for a member's JSON without its name: every number at its maximal length."""


def parts_of(
    items: Iterable[T], size: Callable[[T], int], *, most_bytes: int, most: int | None = None
) -> Iterator[list[T]]:
    """Split items, in order, into parts of at most `most` items and `most_bytes`; a larger item is a part alone."""
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
    """Return the transactions that write `chunks` as the members of (generation, epoch), and then the head, `last`.

    If everything fits into one transaction, the result is that transaction. Otherwise the result writes only the
    missing chunks, in transactions with the compares `guards`; the next plan sees the chunks in the view and
    returns the transaction that writes the head.
    """
    view, folder = job.view, job.keys.members(generation, epoch)
    there = {kv.key: kv.value for kv in view.walk(folder)}
    expected = {job.keys.members_chunk(generation, epoch, index): value for index, value in enumerate(chunks)}
    puts: list[Operation] = [
        Put(key=key, value=value) for key, value in expected.items() if there.get(key) != value
    ]
    if len(puts) + len(last.success) < MAX_OPS and sum(map(_value_bytes, puts)) <= MAX_BYTES:
        if there.keys() - expected.keys():
            first = job.keys.members_chunk(generation, epoch, len(chunks))
            puts.append(Delete(key=first, range_end=prefix_end(folder)))
        return (last.and_if(none_newer_in(folder, view.revision)).then(*puts),)
    parts = parts_of(puts, _value_bytes, most=MAX_OPS, most_bytes=MAX_BYTES)
    return tuple(Txn(compares=tuple(guards), success=tuple(part)) for part in parts)


def _value_bytes(write: Operation) -> int:
    return len(write.value) if isinstance(write, Put) else 0
