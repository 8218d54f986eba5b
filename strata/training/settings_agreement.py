"""What all ranks of a training must have alike, though each reads it of its own settings: `RankSettings`.

A save is a barrier at a step that every rank plans for itself, and a step's samples are divided by a
computed order. Where one node's file or flags say something else, its ranks would wait for a save
that the others do not make, or train on samples that others train on as well. So the ranks meet
before the first step, and what rank 0 was told holds for all of them; a difference is said aloud.

They also tell each other which storage root each one sees: checkpoints of several ranks need one that
all hosts share, and without it the first save would be the first to notice.

That they have met also tells the leader that these ranks heed notices (`core.stop.last_step`).

A loader that is only iterated over may be longer on one rank than on another (files that were dealt
out, say). The ranks tell each other its length before its first epoch, and where these differ all end
with the shortest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from strata.core.stop.last_step import BEGIN_BARRIER
from strata.core.words import ranks_text
from strata.errors import BarrierBroken, BarrierTimeout, ConfigError, Refused, Unavailable
from strata.training.rank_context import RankContext
from strata.training.save.cadence import Rule

LOADER_BARRIER: Final = "strata.loader"
LOADER_S: Final = 60.0
"""How long the lengths of a loader are waited for at a time."""
LOADER_ROUNDS: Final = 5
"""So often: a rank may be late, but it may also take another kind of loader."""
_VERSION: Final = 1
_ROOTS: Final = "roots"
_NO_ROOTS: Final[Mapping[str, str]] = {}

log: Final = logging.getLogger("strata.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What was asked for of the samples: how many a step has, in which order, how divided."""

    global_batch: int | None = None
    seed: int = 0
    uneven: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What one rank was told."""

    rule: Rule
    sampling: Sampling

    def settings(self) -> dict[str, Any]:
        """Return every setting by the name that users give it."""
        return {**asdict(self.rule), **asdict(self.sampling)}


def agree_on_settings(
    context: RankContext, mine: RankSettings, *, roots: Mapping[str, str] = _NO_ROOTS
) -> RankSettings:
    """Return what holds for all ranks, once every one is here; warn where this rank was told otherwise.

    `roots` are the ids of the storage roots that this rank sees, by their URIs; `ConfigError`, on every rank,
    when some rank sees others than rank 0. `Refused` when another version of Strata runs on some of
    them; else what a barrier raises.
    """
    payload = json.dumps(
        {"v": _VERSION, _ROOTS: dict(roots), **mine.settings()}, separators=(",", ":")
    ).encode()
    told = {rank: _read(rank, data) for rank, data in context.barrier(BEGIN_BARRIER, payload).items()}
    if 0 not in told:
        raise Refused("rank 0 did not say what it was told", hint=_ALIKE)
    first = told[0]
    _check_shared({rank: settings.pop(_ROOTS) for rank, settings in told.items()})
    if context.rank == 0:
        _warn_of_others(told)
    else:
        for name, value in mine.settings().items():
            if value != first[name]:
                log.warning("%s is %s here, and %s on rank 0: that holds for all", name, value, first[name])
    return RankSettings(
        rule=Rule(**{name: first[name] for name in Rule.__slots__}),
        sampling=Sampling(**{name: first[name] for name in Sampling.__slots__}),
    )


def _check_shared(roots: Mapping[int, Mapping[str, str]]) -> None:
    """Raise `ConfigError` unless all ranks see the storage roots that rank 0 sees."""
    for rank, seen in sorted(roots.items()):
        for (uri, found), (first_uri, first_found) in zip(seen.items(), roots[0].items(), strict=False):
            if found != first_found:
                raise ConfigError(
                    f"rank {rank} sees another storage at {uri} than rank 0 at {first_uri}",
                    hint="ranks on several hosts need one storage root that they share: mount it on all hosts, or use s3://",
                )
        if len(seen) != len(roots[0]):
            raise ConfigError(
                f"rank {rank} has the storages {', '.join(seen)}, and rank 0 {', '.join(roots[0])}",
                hint="give all ranks the same storage_path and replica",
            )


class Lengths:
    """What the ranks of one generation tell each other of their loaders' lengths.

    Once they were as long on all ranks nobody asks again: a script may make a new loader each epoch,
    and between two saves a training needs no coordinator.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._ask = context.world_size > 1
        self._known: int | None = None
        """What `shortest` returned last."""

    def shortest(self, batches: int | None) -> int | None:
        """Return after how many batches of an epoch all ranks end, of which this one has so many.

        None where all have as many, or one does not know: each then ends with its loader. When the ranks
        can no longer tell each other, it is what it was.
        """
        if not self._ask:
            return self._known
        try:
            told = self._meet(json.dumps({"v": _VERSION, "batches": batches}).encode())
        except (BarrierBroken, BarrierTimeout, Unavailable) as error:
            log.warning("whether all ranks have as many batches is not known: %s", error.message)
            self._ask = False
            return self._known
        self._known = self._shortest_of(told, batches)
        return self._known

    def _meet(self, payload: bytes) -> dict[int, bytes]:
        for _ in range(LOADER_ROUNDS - 1):
            try:
                return self._context.barrier(LOADER_BARRIER, payload, timeout_s=LOADER_S)
            except BarrierTimeout as late:
                # the round is over for all alike, so all come again
                log.warning("waiting on for the length of a loader: %s", late.message)
        return self._context.barrier(LOADER_BARRIER, payload, timeout_s=LOADER_S)

    def _shortest_of(self, told: Mapping[int, bytes], batches: int | None) -> int | None:
        by_rank = {rank: json.loads(data)["batches"] for rank, data in told.items()}
        self._ask = len(set(by_rank.values())) > 1
        if not self._ask or batches is None or None in by_rank.values():
            return None
        fewest = min(by_rank, key=lambda rank: (by_rank[rank], rank))
        if by_rank[fewest] < batches:
            log.warning(
                "rank %d leaves out %d of its %d batches of each epoch: rank %d has %d",
                self._context.rank,
                batches - by_rank[fewest],
                batches,
                fewest,
                by_rank[fewest],
            )
        return int(by_rank[fewest])


def _warn_of_others(told: Mapping[int, Mapping[str, Any]]) -> None:
    for name, value in told[0].items():
        if others := [rank for rank, settings in sorted(told.items()) if settings[name] != value]:
            log.warning(
                "%s differs between the ranks: rank 0's %s holds for all; told otherwise: ranks %s",
                name,
                value,
                ranks_text(others),
            )


def _read(rank: int, payload: bytes) -> dict[str, Any]:
    try:
        body = json.loads(payload)
    except ValueError:
        body = None
    if not isinstance(body, dict) or body.get("v") != _VERSION or body.keys() != _NAMES:
        raise Refused(f"rank {rank} told {payload[:80]!r} before its first step", hint=_ALIKE)
    return body


_NAMES: Final = {"v", _ROOTS, *Rule.__slots__, *Sampling.__slots__}
_ALIKE: Final = "all ranks must run the same version of Strata"
