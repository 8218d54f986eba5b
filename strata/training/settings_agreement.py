"""Agreement of all ranks on settings that must be equal, though each rank reads its own configuration: `RankSettings`.

A save is a barrier at a step that every rank plans by itself, and each rank computes its share of a step's samples.
If one node had other settings, its ranks would wait for a save that the others do not make, or train on samples of
other ranks. So the ranks meet before the first step, and rank 0's settings apply to all ranks; a rank whose
settings differ logs a warning.

At this barrier each rank also sends the ids of its storage roots. Checkpoints of several ranks need a root that all
hosts share; without this check only the first save would fail. The barrier's outcome also shows the leader that these
ranks support graceful stop (`core.stop.last_step`).

`Loaders`: before the first epoch of a loader the ranks exchange its length and, if Strata assigns its samples, the
description of the order. A loader whose samples Strata does not assign may have more batches on one rank than on
another, for example if the program distributes files among the ranks: if the lengths differ, all ranks end the epoch
at the smallest length.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from strata.core.stop.last_step import BEGIN_BARRIER
from strata.core.words import ranks_text
from strata.data.place import DataPlace, check_places
from strata.errors import BarrierBroken, BarrierTimeout, ConfigError, Refused, Unavailable
from strata.training.loop.feeds import Met
from strata.training.rank_context import RankContext
from strata.training.save.cadence import Rule

LOADER_BARRIER: Final = "strata.loader"
LOADER_S: Final = 60.0
"""How long one round waits for the ranks' loader lengths."""
LOADER_ROUNDS: Final = 5
"""How many rounds for lengths: a missing rank may be late, but it may also use no loader. One round is enough for the
order of samples, which each save compares again."""
_VERSION: Final = 2
_ROOTS: Final = "roots"
_PLACE: Final = "place"
_NO_ROOTS: Final[Mapping[str, str]] = {}

log: Final = logging.getLogger("strata.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling settings: the samples of a step, the seed of their order, whether shares may be uneven."""

    global_batch: int | None = None
    seed: int = 0
    uneven: bool = True
    exact_samples: bool = True
    virtual_ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The settings of one rank that must be equal on all ranks."""

    rule: Rule
    sampling: Sampling

    def settings(self) -> dict[str, Any]:
        """Return every setting under its user-visible name."""
        return {**asdict(self.rule), **asdict(self.sampling)}


def agree_on_settings(
    context: RankContext,
    mine: RankSettings,
    *,
    roots: Mapping[str, str] = _NO_ROOTS,
    place: DataPlace | None = None,
) -> RankSettings:
    """Return rank 0's settings once every rank has arrived; log a warning if this rank's differ.

    `roots` maps the URIs of this rank's storage roots to their ids, and `place` is its data-parallel place (None: one of
    its own). `ConfigError` on every rank if some rank's roots differ from rank 0's, or if the places do not fit
    together. `Refused` if some ranks run another version of Strata. Otherwise raises as a barrier does.
    """
    place = place or DataPlace(context.rank, context.world_size)
    payload = json.dumps(
        {"v": _VERSION, _ROOTS: dict(roots), _PLACE: [place.rank, place.size], **mine.settings()},
        separators=(",", ":"),
    ).encode()
    received = {rank: _read(rank, data) for rank, data in context.barrier(BEGIN_BARRIER, payload).items()}
    if 0 not in received:
        raise Refused("rank 0 sent no settings", hint=_SAME_VERSION)
    first = received[0]
    _check_shared({rank: settings.pop(_ROOTS) for rank, settings in received.items()})
    check_places({rank: DataPlace(*settings.pop(_PLACE)) for rank, settings in received.items()})
    if context.rank == 0:
        _warn_of_others(received)
    else:
        for name, value in mine.settings().items():
            if value != first[name]:
                log.warning(
                    "%s is %s here, and %s on rank 0: all ranks use that of rank 0", name, value, first[name]
                )
    return RankSettings(
        rule=Rule(**{name: first[name] for name in Rule.__slots__}),
        sampling=Sampling(**{name: first[name] for name in Sampling.__slots__}),
    )


def _check_shared(roots: Mapping[int, Mapping[str, str]]) -> None:
    """Raise `ConfigError` unless all ranks see the same storage roots as rank 0."""
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


class Loaders:
    """Exchanges the lengths and the orders of loaders between the ranks of one generation.

    Once they were equal on all ranks, no further exchange of the same order takes place, even if the script makes a
    new loader each epoch: between two saves a training must need no coordinator.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._exchanging = context.world_size > 1
        self._known: dict[str, int | None] = {}
        """The shortest length by order, as last exchanged."""
        self._agreed: set[str] = set()
        """The orders that were equal on all ranks, with equal lengths."""

    def meet(self, batches: int | None, order: str, decides: bool = True) -> Met:
        """Return what the ranks have in common, given this rank's number of batches (None: unknown) and its order.

        If the answer `decides` what a rank trains on, late ranks are waited for longer.
        If the exchange fails, returns the last length, and takes the orders as equal: the next save compares them.
        """
        if not self._exchanging or order in self._agreed:
            return Met(self._known.get(order))
        payload = json.dumps({"v": _VERSION, "batches": batches, "order": order}).encode()
        try:
            rounds = LOADER_ROUNDS if decides else 1
            received = {rank: json.loads(data) for rank, data in self._meet(payload, rounds).items()}
        except (BarrierBroken, BarrierTimeout, Unavailable) as error:
            log.warning("cannot learn if all ranks have the same data: %s", error.message)
            self._exchanging = False
            return Met(self._known.get(order))
        same = {one["order"] for one in received.values()} == {order}
        shortest = self._shortest_of({rank: one["batches"] for rank, one in received.items()}, batches)
        self._known[order] = shortest
        lengths = {one["batches"] for one in received.values()}
        if same and len(lengths) == 1:
            self._agreed.add(order)
        return Met(shortest, same)

    def _meet(self, payload: bytes, rounds: int) -> dict[int, bytes]:
        for _ in range(rounds - 1):
            try:
                return self._context.barrier(LOADER_BARRIER, payload, timeout_s=LOADER_S)
            except BarrierTimeout as late:
                # the round has ended for all ranks, so all of them enter the next one
                log.warning("still waiting for another rank's loader: %s", late.message)
        return self._context.barrier(LOADER_BARRIER, payload, timeout_s=LOADER_S)

    def _shortest_of(self, by_rank: Mapping[int, int | None], batches: int | None) -> int | None:
        lengths = {rank: count for rank, count in by_rank.items() if count is not None}
        if batches is None or len(lengths) < len(by_rank) or len(set(lengths.values())) == 1:
            return None
        fewest = min(lengths, key=lambda rank: (lengths[rank], rank))
        if lengths[fewest] < batches:
            log.warning(
                "rank %d leaves out %d of its %d batches of each epoch: rank %d has %d",
                self._context.rank,
                batches - lengths[fewest],
                batches,
                fewest,
                lengths[fewest],
            )
        return lengths[fewest]


def _warn_of_others(received: Mapping[int, Mapping[str, Any]]) -> None:
    for name, value in received[0].items():
        if others := [rank for rank, settings in sorted(received.items()) if settings[name] != value]:
            log.warning(
                "%s differs between the ranks: all use rank 0's %s; other values: ranks %s",
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
        raise Refused(f"rank {rank} sent {payload[:80]!r} before its first step", hint=_SAME_VERSION)
    return body


_NAMES: Final = {"v", _ROOTS, _PLACE, *Rule.__slots__, *Sampling.__slots__}
_SAME_VERSION: Final = "all ranks must run the same version of Strata"
