"""The memory of snapshots is absent from a forked child."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

from strata.checkpoint.snapshot.memory import Arena, address_of, allocate, keep_in_children

SIZE = 8 << 20


def holds_in_a_child(look: Callable[[], bool]) -> bool:
    """Return the result of `look` in a forked child."""
    child = os.fork()
    if child == 0:
        os._exit(0 if look() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_that_drops_an_arena_keeps_its_own_memory() -> None:
    arenas = [Arena() for _ in range(4)]
    for arena in arenas:
        arena.take(SIZE)[:4] = b"ours"
    del arena

    def look() -> bool:
        # new mappings land at free addresses; dropping the arenas must not unmap them
        own = [mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(8)]
        for block in own:
            block[:4] = b"mine"
        arenas.clear()
        return all(block[:4] == b"mine" for block in own)

    assert holds_in_a_child(look)
    assert all(bytes(arena.take(SIZE)[:4]) == b"ours" for arena in arenas)


def test_a_child_finds_an_arena_empty() -> None:
    arena = Arena()
    view = arena.take(SIZE)
    view[:4] = b"ours"
    assert holds_in_a_child(lambda: bytes(view[:4]) == bytes(4))


def test_a_kept_block_is_readable_in_a_forked_child() -> None:
    block = allocate(SIZE, inherited=False)
    block[-4:] = b"read"
    keep_in_children(block)
    assert holds_in_a_child(lambda: bytes(block[-4:]) == b"read")


def test_lent_memory_is_reused_unless_a_reference_to_it_remains() -> None:
    arena = Arena()
    view = arena.lend(SIZE)
    address = address_of(view)
    part = view[10:20]
    del view
    part[:4] = b"kept"
    arena.take_back()
    other = arena.take(SIZE)
    assert address_of(other) != address
    other[:20] = bytes(20)
    assert bytes(part[:4]) == b"kept"
    assert holds_in_a_child(lambda: bytes(part[:4]) == b"kept")
    again = arena.lend(SIZE)
    address = address_of(again)
    del again
    arena.take_back()
    assert address_of(arena.take(SIZE)) == address, "nobody held it"
