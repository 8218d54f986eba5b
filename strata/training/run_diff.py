"""The comparison of two trainings by their checkpoints of one step: what is compared, in which order and groups. Pure.

Strata's own entries are compared only if they say which samples the training has used. The others legitimately differ
between equal trainings: paces and goodput (times), DDP's buckets, and counts of one rank's batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from strata.checkpoint.format.manifest import Manifest, RankManifest
from strata.checkpoint.restore.element_diff import ElementDifference
from strata.checkpoint.restore.reader import is_under, value_at
from strata.checkpoint.restore.whole_diff import Pair, PlainValue, Ranks, Value, Values, compare
from strata.checkpoint.snapshot.state import children, join
from strata.core.health.reported import REPORTED_KEY
from strata.documents.parsing import NOTE, json_object
from strata.training.loop.cursors import CURSORS_KEY, merged
from strata.training.loop.training_data import DATASET_KEY, DATASETS_KEY
from strata.training.save.state import LOADER_KEY, OWN_KEY

MODEL: Final = "model"
OPTIM: Final = "optim"
SCHED: Final = "sched"
OTHER: Final = "other"
SAMPLES: Final = "samples"
REPORTED: Final = "reported"
RANDOM: Final = "random"
GROUPS: Final = (MODEL, OPTIM, SCHED, OTHER, SAMPLES, REPORTED, RANDOM)
"""The groups of entries, in the order in which they are compared."""

CURSORS_PATH: Final = join(OWN_KEY, CURSORS_KEY)
REPORTED_PATH: Final = join(OWN_KEY, REPORTED)
RANDOM_PATH: Final = join(OWN_KEY, "rng")
"""The path under which random states are compared: no entry of a user's state is below `OWN_KEY`."""
_SAMPLES: Final = frozenset(
    {
        *(join(OWN_KEY, name) for name in ("step", "epoch", "epoch_samples", "samples")),
        *(join(join(OWN_KEY, LOADER_KEY), name) for name in ("length", "seed", "global_batch")),
        join(OWN_KEY, DATASET_KEY),
        join(OWN_KEY, DATASETS_KEY),
        CURSORS_PATH,
    }
)
"""The entries that determine the samples that a training has used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The manifests of one checkpoint in `folder`."""

    folder: str
    manifest: Manifest
    ranks: Sequence[RankManifest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A pair, its group, and for a pair of tensors whose bytes were read, the elements that differ."""

    pair: Pair
    group: str
    elements: ElementDifference | None = None

    @property
    def same(self) -> bool | None:
        return self.pair.same

    def read(self, elements: ElementDifference | None) -> Compared:
        """Return the result after the bytes were read: `elements` is None if all bits are equal."""
        return replace(self, pair=replace(self.pair, same=elements is None), elements=elements)


def group_of(path: str) -> str | None:
    """Return the group of an entry; None for an entry of Strata's own that is not compared."""
    top = path.partition(".")[0]
    if top != OWN_KEY:
        return next((group for group in (MODEL, OPTIM, SCHED) if top.startswith(group)), OTHER)
    if is_under(path, _SAMPLES):
        return SAMPLES
    if is_under(path, {REPORTED_PATH}):
        return REPORTED
    return RANDOM if is_under(path, {RANDOM_PATH}) else None


def compare_step(a: Contents, b: Contents, *, ignored: Collection[str] = ()) -> list[Compared]:
    """Return the compared entries of two checkpoints of one step, in order.

    The order: by group, and in a group as the state has them; the group of other entries is sorted by path. Entries at
    the paths `ignored` and below are left out.
    """
    reported = [contents.manifest.metadata.get(REPORTED_KEY) for contents in (a, b)]
    values = [
        _values(contents, text if None not in reported else None)
        for contents, text in zip((a, b), reported, strict=True)
    ]
    found = [
        Compared(pair=pair, group=group)
        for pair in compare(*values)
        if (group := group_of(pair.path)) is not None and not is_under(pair.path, ignored)
    ]
    return sorted(found, key=lambda c: (GROUPS.index(c.group), c.pair.path if c.group == OTHER else ""))


def _values(contents: Contents, reported: str | None) -> list[Values]:
    """Return each rank's values by path."""
    ranks = Ranks(contents.folder, contents.ranks)
    of_all = _cursors(contents) | _reported(reported)
    found: list[Values] = []
    for rank, manifest in enumerate(contents.ranks):
        values = ranks.values(manifest.tree, rank)
        values.pop(CURSORS_PATH, None)
        for name, state in children(manifest.rng) or ():
            values |= _random_state(ranks.values(state, rank, path=join(RANDOM_PATH, name)), name)
        found.append({**values, **of_all})
    return found


def _random_state(values: Values, name: Any) -> dict[str, Value]:
    """Return a generator's state with all of its plain values as one: Python's has hundreds of numbers."""
    plain = [value.exact for value in values.values() if isinstance(value, PlainValue)]
    found = {path: value for path, value in values.items() if not isinstance(value, PlainValue)}
    return (
        {**found, join(RANDOM_PATH, name): PlainValue(exact=repr(plain), text="a state")}
        if plain
        else {**found}
    )


def _cursors(contents: Contents) -> dict[str, PlainValue]:
    """Return the cursor of each shard; a rank saves only some of the cursors, so those of all ranks are merged."""
    keys = (OWN_KEY, CURSORS_KEY)
    texts = [value for rank in contents.ranks if isinstance(value := value_at(rank.tree, keys), str)]
    return {
        join(join(CURSORS_PATH, dataset), shard): _plain(list(place))
        for dataset, places in sorted(merged(texts).items())
        for shard, place in sorted(places.items())
    }


def _reported(text: str | None) -> dict[str, PlainValue]:
    if text is None:
        return {}
    try:
        numbers = json_object(text, NOTE)
    except ValueError:
        return {REPORTED_PATH: _plain(text)}
    return {join(REPORTED_PATH, name): _plain(number) for name, number in sorted(numbers.items())}


def _plain(value: object) -> PlainValue:
    return PlainValue(exact=repr(value), text=repr(value))


# -- the result of a step -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The comparison of one step. `compared` has the number of entries by group, `different` the paths that differ."""

    step: int
    compared: Mapping[str, int]
    different: Mapping[str, Sequence[str]]
    first: Compared | None
    """The first entry that differs."""

    @property
    def only_random(self) -> bool:
        """Whether nothing differs but random states."""
        return not any(paths for group, paths in self.different.items() if group != RANDOM)


def result_of(step: int, entries: Sequence[Compared]) -> StepResult:
    """Return the result of a step whose entries are all decided."""
    return StepResult(
        step=step,
        compared={group: len(_paths(entries, group)) for group in GROUPS},
        different={group: _paths([c for c in entries if not c.same], group) for group in GROUPS},
        first=next((c for c in entries if not c.same), None),
    )


def _paths(entries: Sequence[Compared], group: str) -> list[str]:
    return list(dict.fromkeys(c.pair.path for c in entries if c.group == group))
