"""Retention rules: which checkpoints a policy keeps, and why; the same rules with coordinators and without.

A policy has several rules, and a checkpoint stays if any rule selects it. Rules count per kind: whole-state
checkpoints are one kind, each partial type is another. The reasons are sentences for people.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from strata.core.checkpoints.references import Keep
from strata.core.kv.records import CheckpointType
from strata.errors import InvalidArgument

WHOLE = frozenset({CheckpointType.FULL, CheckpointType.INCREMENTAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The properties of a committed checkpoint that rules use.

    `counts`: the position in the order, (generation, step). `superseded`: a later world began from an older
    checkpoint, so this checkpoint does not count as newer than others. `key`: the caller's own name for the checkpoint.
    """

    key: str
    type: CheckpointType
    step: int
    counts: tuple[int, int]
    created_unix_ms: int
    superseded: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


def check_keep(keep: Keep) -> None:
    """Raise `InvalidArgument`, naming the rule, if the rules make no sense."""
    for name in ("latest", "every_steps", "best", "age_ms"):
        if getattr(keep, name) < 0:
            raise InvalidArgument(
                f"{name} is {getattr(keep, name)}", hint="pass 0 for no such rule, or 1 and above"
            )
    if bool(keep.best) != bool(keep.metric):
        raise InvalidArgument(
            "best and metric belong together: how many, and by which number of the metadata",
            hint='keep the 3 best by metadata["loss"]: best=3, metric="loss"',
        )
    if not keep.everything and not keep.latest:
        raise InvalidArgument(
            "the rules keep none of the newest", hint="add latest, of 1 or more, to the other rules"
        )


def kept(candidates: Iterable[Candidate], keep: Keep, *, now_unix_ms: int) -> dict[str, str]:
    """Return the keys of the checkpoints that stay, each with its reason."""
    every = list(candidates)
    if keep.everything:
        return dict.fromkeys((c.key for c in every), "everything is kept")
    kinds: defaultdict[frozenset[CheckpointType], list[Candidate]] = defaultdict(list)
    for candidate in every:
        kinds[_kind_of(candidate)].append(candidate)
    found: dict[str, str] = {}
    for kind in kinds.values():
        kind.sort(key=lambda c: c.counts)
        for rule in (_latest, _every, _best, _young):
            for key, why in rule(kind, keep, now_unix_ms).items():
                found.setdefault(key, why)
    return found


def newest_of_each_step(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return, for each kind and step, the checkpoint that counts as newest; a load of the step reads this one."""
    found: dict[tuple[frozenset[CheckpointType], int], Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.counts):
        found[_kind_of(candidate), candidate.step] = candidate
    return list(found.values())


def _kind_of(candidate: Candidate) -> frozenset[CheckpointType]:
    return WHOLE if candidate.type in WHOLE else frozenset({candidate.type})


def _latest(kind: Sequence[Candidate], keep: Keep, _now: int) -> dict[str, str]:
    """Select the newest checkpoints. A superseded one, like any other, stays until there are `latest` newer ones."""
    found, newer = {}, 0
    for candidate in reversed(kind):
        if newer < keep.latest:
            found[candidate.key] = f"one of the {keep.latest} newest"
        newer += not candidate.superseded
    return found


def _every(kind: Sequence[Candidate], keep: Keep, _now: int) -> dict[str, str]:
    """Select the first checkpoint at or after each multiple: saves are seldom due exactly at a multiple."""
    if not keep.every_steps:
        return {}
    firsts: dict[int, Candidate] = {}
    for candidate in kind:
        number = candidate.step // keep.every_steps
        if candidate.superseded or (number == 0 and candidate.step > 0):
            continue
        first = firsts.get(number)
        if first is None or candidate.step < first.step:
            firsts[number] = candidate
    return {c.key: f"the first from step {n * keep.every_steps} on" for n, c in firsts.items()}


def _best(kind: Sequence[Candidate], keep: Keep, _now: int) -> dict[str, str]:
    """Select the best. A checkpoint without the metric is never selected; of two equal ones the newer is."""
    scored = []
    for candidate in kind:
        try:
            number = float(candidate.metadata.get(keep.metric, ""))
        except ValueError:
            continue
        if math.isfinite(number):
            scored.append((number if keep.highest else -number, candidate.counts, candidate))
    scored.sort(key=lambda each: each[:2], reverse=True)
    return {
        c.key: f"one of the {keep.best} best by {keep.metric}: {c.metadata[keep.metric]}"
        for _score, _counts, c in scored[: keep.best]
    }


def _young(kind: Sequence[Candidate], keep: Keep, now_unix_ms: int) -> dict[str, str]:
    return {
        c.key: f"younger than {keep.age_ms / 3_600_000:g} h"
        for c in kind
        if keep.age_ms and now_unix_ms - c.created_unix_ms < keep.age_ms
    }
