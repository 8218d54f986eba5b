"""When which fault begins, and for how long: all of it drawn before the first one, from one seed.

The plan names kinds, not processes: "the leader" is found when the time comes. What is left to
chance then (which follower, which pair) is decided by the entry's `choice`, a number of the same
seed. So a seed gives the same plan on every machine, and a run of it aims at the same roles.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from strata.errors import ConfigError
from strata_chaos.scenario import RandomFaults, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault of a plan; times are from the plan's begin.

    One that the script wants must take effect; one that was drawn may find nothing to break.
    """

    number: int
    fault: str
    at_s: float
    hold_s: float
    choice: int
    required: bool

    @property
    def end_s(self) -> float:
        """When it is healed."""
        return round(self.at_s + self.hold_s, 1)


def plan(
    scenario: Scenario, *, rng: random.Random, duration_s: float, usable: Collection[str]
) -> tuple[PlannedFault, ...]:
    """Return the faults of one run, by time: each is healed again before `duration_s` is over.

    Faults that are not in `usable` are never drawn; a script that names one is refused, and so is
    a time in which none of the scenario's faults has room.
    """
    for entry in scenario.script:
        if entry.name not in usable:
            raise ConfigError(f"scenario {scenario.name}: the fault {entry.name} cannot be had here")
    wanted = [*_scripted(scenario, duration_s)]
    if scenario.random is not None:
        wanted += _drawn(scenario.random, rng, duration_s, usable, tuple(wanted))
    if scenario.fault_names and not wanted:
        raise ConfigError(
            f"scenario {scenario.name}: no fault has room in {duration_s:g} s, or none can be had here",
            hint=f"give it more time; its own duration is {scenario.duration_s:g} s",
        )
    wanted.sort(key=lambda item: item[0])  # stable: of two at one time the script's comes first
    return tuple(
        PlannedFault(
            number=number,
            fault=fault,
            at_s=at_s,
            hold_s=hold_s,
            choice=rng.getrandbits(32),
            required=required,
        )
        for number, (at_s, hold_s, fault, required) in enumerate(wanted, 1)
    )


_Wanted = tuple[float, float, str, bool]


def _scripted(scenario: Scenario, duration_s: float) -> Iterator[_Wanted]:
    for entry in scenario.script:
        at_s = entry.at_s
        while at_s + entry.hold_s <= duration_s:
            yield at_s, entry.hold_s, entry.name, True
            if not entry.every_s:
                break
            at_s += entry.every_s


def _drawn(
    spec: RandomFaults,
    rng: random.Random,
    duration_s: float,
    usable: Collection[str],
    scripted: Collection[_Wanted],
) -> Iterator[_Wanted]:
    """Yield drawn faults; those of the script count as being in force, so that none loses its target."""
    weights = {name: weight for name, weight in spec.weights.items() if name in usable and weight > 0}
    if not weights:
        return
    taken = [(at_s, at_s + hold_s) for at_s, hold_s, _fault, _required in scripted]
    at_s = 0.0
    while True:
        at_s = round(at_s + rng.uniform(*spec.gap_s), 1)
        (fault,) = rng.choices(list(weights), list(weights.values()))
        hold_s = round(rng.uniform(*spec.hold_s), 1)
        while (
            len(ends := [end for begin, end in taken if begin <= round(at_s + hold_s, 1) and at_s < end])
            >= spec.overlap
        ):
            at_s = min(ends)
        if round(at_s + hold_s, 1) > duration_s:
            return
        taken.append((at_s, round(at_s + hold_s, 1)))
        yield at_s, hold_s, fault, False
