"""Checks the guarantees after the kill of a rank, from the reports of the processes and the control plane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from tests.rank_kills.plan import Moment

Event = dict[str, Any]


def resumption(steps: Sequence[int], *, seen: int, committed: int) -> Iterator[str]:
    """Yield the problems of the steps at which the ranks of a generation began.

    `seen` is the newest commit that any process reported before the kill. `committed` is the newest commit of all
    older generations in the control plane's history. 0 means no commit.
    """
    if len(set(steps)) != 1:
        yield f"the ranks began from different steps: {steps}"
    for step in sorted(set(steps)):
        if step < seen:
            yield f"it began from step {step} although {seen} was known to be committed before the kill"
        if step != committed:
            yield f"it began from step {step}, but the newest committed step is {committed}"


def bits(events: Sequence[Event], undisturbed: Sequence[Event]) -> Iterator[str]:
    """Yield the differences from an undisturbed training, in any step of any rank and in the final states."""
    right = {(e["rank"], e["step"]): e["digest"] for e in _of(undisturbed, "step")}
    for event in _of(events, "step"):
        if event["digest"] != right.get((event["rank"], event["step"])):
            yield f"rank {event['rank']} of generation {event['generation']} differs at step {event['step']}"
    done = {(e["rank"], e["step"]) for e in _of(events, "step")}
    if missing := sorted(right.keys() - done):
        yield f"{len(missing)} steps were never trained, the first by rank and step: {missing[0]}"
    ends, right_ends = (
        {(e["rank"], e["step"], e["digest"]) for e in _of(all_of_them, "end")}
        for all_of_them in (events, undisturbed)
    )
    if not right_ends or ends != right_ends:
        yield f"the training ended with {sorted(ends)}, the undisturbed one with {sorted(right_ends)}"


def order(events: Sequence[Event]) -> Iterator[str]:
    """Yield where a rank skipped or repeated a step within a generation."""
    for place in sorted({(e["generation"], e["rank"]) for e in _of(events, "begun")}):
        mine = [e for e in events if (e.get("generation"), e.get("rank")) == place]
        steps = [e["step"] for e in mine if e["event"] in {"begun", "step"}]
        for before, after in pairwise(steps):
            if after != before + 1:
                yield f"rank {place[1]} of generation {place[0]} trained step {after} after {before}"


def retention(folders: Sequence[str], *, keep_count: int, full_every: int) -> Iterator[str]:
    """Yield the problems of the checkpoints in storage at the end.

    Besides the newest `keep_count` checkpoints, only checkpoints whose bytes they use may stay; such a chain begins
    with a Full.
    """
    most = keep_count + full_every - 1
    if not 0 < len(folders) <= most:
        yield f"storage holds {len(folders)} checkpoints, at most {most} may stay: {', '.join(folders)}"


def met(events: Sequence[Event]) -> Moment:
    """Return the moment at which a process died, given all events that it reported."""
    kinds = [e["event"] for e in events]
    if "begun" not in kinds:
        return Moment.RESTORING
    last = {kind: len(kinds) - kinds[::-1].index(kind) for kind in set(kinds)}
    if last.get("saving", 0) > max(last.get("committed", 0), last["begun"]):
        return Moment.MID_SAVE
    return Moment.AFTER_COMMIT if kinds[-1] == "committed" else Moment.MID_STEP


def _of(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]
