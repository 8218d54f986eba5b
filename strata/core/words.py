"""Text forms of ranks, long lists and times for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ranks_text(ranks: Iterable[int], *, between: str = ", ", most: int | None = None) -> str:
    """Return ranks as `0-3, 7`: sorted, runs joined; equal sets give equal texts.

    If there are more than `most` runs, return the first ones and the number of further ranks.
    """
    runs: list[range] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1].stop:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:most]]
    more = sum(map(len, runs[len(shown) :]))
    return between.join(shown) + (f" and {more} more" if more else "")


def first_few(names: Sequence[str], most: int) -> str:
    """Return the first `most` names, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def span(seconds: float) -> str:
    """Return a time as text, with a finer unit for short times."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
