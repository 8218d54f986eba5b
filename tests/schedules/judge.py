"""Checks the guarantees for a training under a schedule, from the output of its processes.

It shares no code with Strata but the sampler's definition, which the reference values use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Event = dict[str, Any]
DONE = 0
GOODPUT_ERROR = 0.005
LATE = frozenset({75, 78, 143, -15})
"""Exit codes of `strata run` if it is preempted when the job is nearly done, or gets SIGTERM too early to handle it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The newest committed step that the control plane reported by the time `at` of the monotonic clock."""

    at: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnd:
    """How a node's agent ended by itself; `code` is None if the driver had to end it.

    `late`: the node was frozen, preempted or started when other nodes may have been done. `left`: the processes that
    the node left behind.
    """

    name: str
    code: int | None
    late: bool
    left: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All data to judge."""

    events: Sequence[Event]
    looked: Sequence[Looked]
    nodes: Sequence[NodeEnd]
    committed: Sequence[tuple[int, int]] = ()
    """From the control plane's own history: each generation and the newest step that it committed."""
    began_unix_s: float | None = None
    """When the first generation began."""


def judge(history: History, values: Sequence[int]) -> list[str]:
    """Return each violation in words; `values` are the right parameters, before step 1 and after each step."""
    return [
        *_steps(history.events, values),
        *_generations(history.events),
        *_lost(history),
        *_backwards(history),
        *_finished(history, values),
        *_goodput(history),
    ]


def _steps(events: Sequence[Event], values: Sequence[int]) -> Iterator[str]:
    """Every step of every process follows the previous step, and yields the right parameter."""
    last: dict[tuple[str, int, int], int] = {}
    for event in events:
        if event["event"] not in {"start", "step"}:
            continue
        who = (event["source"], event["generation"], event["rank"])
        step = event["step"]
        name = f"rank {event['rank']} of generation {event['generation']}"
        if event["event"] == "step" and step != last.get(who, -1) + 1:
            yield f"{name} trained step {step} after {last.get(who)}"
        if not 0 <= step < len(values):
            yield f"{name} is at step {step}, of {len(values) - 1}"
        elif event["value"] != str(values[step]):
            yield f"{name} has a wrong parameter after step {step}"
        last[who] = step


def _generations(events: Sequence[Event]) -> Iterator[str]:
    """All ranks of a generation begin at the same step, in worlds of the same size."""
    begins: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for event in _of(events, "start"):
        begins[event["generation"]].add((event["step"], event["world"]))
    for generation, different in begins.items():
        if len(different) > 1:
            yield f"generation {generation} began differently, as (step, world): {sorted(different)}"


def _lost(history: History) -> Iterator[str]:
    """No generation begins before a step that an older generation had committed.

    The rule uses steps that were known to be committed before a rank of this generation began and before any newer
    generation began. Such a step can have been committed by an older generation only.
    """
    starts = _of(history.events, "start")
    for start in starts:
        newer = [e["at"] for e in starts if e["generation"] > start["generation"]]
        limit = min([start["at"], *newer])
        committed = max((look.step for look in history.looked if look.at < limit), default=0)
        if start["step"] < committed:
            yield (
                f"rank {start['rank']} of generation {start['generation']} began from step {start['step']}"
                f" although {committed} was committed"
            )


def _backwards(history: History) -> Iterator[str]:
    """No generation commits a lower step than an older generation did."""
    ordered = sorted(history.committed)
    for (older, more), (newer, less) in pairwise(ordered):
        if less < more:
            yield f"generation {newer} committed step {less}, generation {older} before it {more}"
        if older == newer:
            yield f"generation {newer} is twice in the history"


def _finished(history: History, values: Sequence[int]) -> Iterator[str]:
    """The training came to its end, every node reported that, and no process is left."""
    ends = _of(history.events, "end")
    total = len(values) - 1
    if not ends:
        yield "no rank came to the end of the training"
    for end in ends:
        if (end["step"], end["value"]) != (total, str(values[-1])):
            yield f"rank {end['rank']} ended at step {end['step']} of {total} with {end['value']}"
    for node in history.nodes:
        if node.code != DONE and not (node.late and node.code in LATE):
            yield f"{node.name} " + ("did not end" if node.code is None else f"ended with {node.code}")
        if node.left:
            yield f"of {node.name} there are left: {dict(node.left)}"


def _goodput(history: History) -> Iterator[str]:
    """The times that rank 0 reports by category add up to the time since the first generation began."""
    for end in _of(history.events, "end"):
        if end["rank"] == 0 and history.began_unix_s is not None:
            wall_s, spent_s = end["unix_s"] - history.began_unix_s, sum(end["spent_s"].values())
            if abs(spent_s - wall_s) > GOODPUT_ERROR * wall_s:
                yield f"the time went to {spent_s:.2f} s, of {wall_s:.2f} s: {end['spent_s']}"


def _of(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]
