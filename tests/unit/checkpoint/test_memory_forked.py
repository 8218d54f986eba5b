"""What a forked child has of the memory that snapshots lie in."""

from __future__ import annotations

import mmap
import os

from strata.checkpoint.memory import Arena

SIZE = 8 << 20


def test_a_child_that_drops_an_arena_keeps_its_own_memory() -> None:
    arenas = [Arena() for _ in range(4)]
    for arena in arenas:
        arena.take(SIZE)[:4] = b"ours"
    child = os.fork()
    if child == 0:
        # new memory goes where there is room, and dropping the arenas must not take it away
        own = [mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(8)]
        for block in own:
            block[:4] = b"mine"
        arenas.clear()
        del arena
        os._exit(0 if all(block[:4] == b"mine" for block in own) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert all(bytes(arena.take(SIZE)[:4]) == b"ours" for arena in arenas)


def test_a_child_finds_an_arena_empty() -> None:
    arena = Arena()
    view = arena.take(SIZE)
    view[:4] = b"ours"
    child = os.fork()
    if child == 0:
        os._exit(0 if bytes(view[:4]) == bytes(4) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
