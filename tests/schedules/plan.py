"""Plans a schedule: the deeds (faults and requests) that a training gets, and their times.

The seed decides everything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """A kind of deed."""

    KILL_RANK = "kill_rank"
    FREEZE_RANK = "freeze_rank"
    """The rank stays frozen until the failure detection acts."""
    KILL_NODE = "kill_node"
    """SIGKILL to the node's agent; the node comes back after `lasting_s`."""
    FREEZE_NODE = "freeze_node"
    """The agent and its ranks are stopped for `lasting_s`."""
    KILL_LEADER = "kill_leader"
    """The leader is started again after `lasting_s`."""
    FREEZE_LEADER = "freeze_leader"
    SCALE = "scale"
    """From now on the job accepts `amount` members."""
    PAUSE = "pause"
    """The job is paused, and resumed after `lasting_s`."""
    PREEMPT = "preempt"
    """The job is preempted; each node is started again `lasting_s` after it left, as a job queue does."""
    TERM_NODE = "term_node"
    """SIGTERM to a node's agent; the effect is that of a preemption."""
    DRAIN = "drain"
    """One node is drained, and comes back `lasting_s` after it left."""


WEIGHTS = {
    Kind.KILL_RANK: 5,
    Kind.FREEZE_RANK: 2,
    Kind.KILL_NODE: 3,
    Kind.FREEZE_NODE: 2,
    Kind.KILL_LEADER: 3,
    Kind.FREEZE_LEADER: 1,
    Kind.SCALE: 3,
    Kind.PAUSE: 1,
    Kind.PREEMPT: 1,
    Kind.TERM_NODE: 2,
    Kind.DRAIN: 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One deed, done `delay_s` after `steps` more steps were trained since the previous deed."""

    kind: Kind
    steps: int
    delay_s: float
    node: int = 0
    lasting_s: float = 0.0
    amount: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A training of `nodes` members with one or two ranks each; it needs `min_workers` of them."""

    seed: int
    nodes: int
    slots: int
    min_workers: int
    save_every: int
    epochs: int
    events: tuple[Event, ...] = field(default=())


def make_plan(seed: int, *, epochs: int = 10, events: int | None = None, kinds: frozenset[Kind]) -> Plan:
    """Return the schedule of a seed, made of `kinds` only.

    The kind of the first deed follows from the seed: consecutive seeds, as many as there are kinds, cover all kinds.
    """
    rng = random.Random(seed)
    nodes = 3
    chosen = sorted(kinds)
    count = rng.randint(2, 5) if events is None else events
    return Plan(
        seed=seed,
        nodes=nodes,
        slots=rng.choice((1, 1, 2)),
        min_workers=rng.randint(1, 2),
        save_every=rng.choice((3, 5, 8)),
        epochs=epochs,
        events=tuple(
            _event(rng, [chosen[seed % len(chosen)]] if number == 0 else chosen, nodes)
            for number in range(count)
        ),
    )


def _event(rng: random.Random, kinds: list[Kind], nodes: int) -> Event:
    kind = rng.choices(kinds, weights=[WEIGHTS[kind] for kind in kinds])[0]
    at_once = rng.random() < 0.3
    lasting_s = {
        Kind.KILL_NODE: rng.uniform(0.0, 4.0),
        Kind.FREEZE_NODE: rng.choice((rng.uniform(0.2, 1.5), rng.uniform(3.0, 6.0))),
        Kind.KILL_LEADER: rng.uniform(0.0, 3.0),
        Kind.FREEZE_LEADER: rng.uniform(0.5, 8.0),
        Kind.PAUSE: rng.uniform(0.5, 3.0),
        Kind.PREEMPT: rng.uniform(0.0, 2.0),
        Kind.TERM_NODE: rng.uniform(0.0, 2.0),
        Kind.DRAIN: rng.uniform(0.0, 3.0),
    }
    return Event(
        kind=kind,
        steps=0 if at_once else rng.randint(4, 30),
        delay_s=rng.choice((0.0, rng.uniform(0.0, 0.1), rng.uniform(0.0, 1.5))),
        node=rng.randrange(nodes),
        lasting_s=round(lasting_s.get(kind, 0.0), 2),
        amount=rng.randint(1, nodes),
    )
