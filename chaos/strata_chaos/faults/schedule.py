"""The plan of a run: start and duration of each fault, all drawn from one seed before the first fault.

The plan names roles, not processes: the nemesis looks up "the leader" at the time of injection. The nemesis makes its
other choices (which follower, which pair) by the entry's `choice`, a number from the same seed. So a seed gives the
same plan on every machine, and all runs of the seed aim at the same roles.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from strata.errors import ConfigError
from strata_chaos.scenario import RandomFaults, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault of a plan. Times count from the start of the plan.

    A scripted fault is `required`: it must take effect. A drawn fault need not: it may find nothing to break.
    """

    number: int
    fault: str
    at_s: float
    hold_s: float
    choice: int
    required: bool

    @property
    def end_s(self) -> float:
        """The time at which the fault is healed."""
        return round(self.at_s + self.hold_s, 1)


def plan(
    scenario: Scenario, *, rng: random.Random, duration_s: float, usable: Collection[str]
) -> tuple[PlannedFault, ...]:
    """Return the faults of one run, by time. Each is healed before `duration_s` is over.

    Faults outside `usable` are never drawn. Raises `ConfigError` if the script names such a fault, or if no fault of
    the scenario fits into the duration.
    """
    for entry in scenario.script:
        if entry.name not in usable:
            raise ConfigError(f"scenario {scenario.name}: the fault {entry.name} is not available here")
    faults = [*_scripted(scenario, duration_s)]
    if scenario.random is not None:
        faults += _drawn(scenario.random, rng, duration_s, usable, tuple(faults))
    if scenario.fault_names and not faults:
        raise ConfigError(
            f"scenario {scenario.name}: no fault fits into {duration_s:g} s, or none is available here",
            hint=f"give it more time; its own duration is {scenario.duration_s:g} s",
        )
    faults.sort(key=lambda item: item[0])  # stable: at equal times the scripted fault comes first
    return tuple(
        PlannedFault(
            number=number,
            fault=fault,
            at_s=at_s,
            hold_s=hold_s,
            choice=rng.getrandbits(32),
            required=required,
        )
        for number, (at_s, hold_s, fault, required) in enumerate(faults, 1)
    )


_Entry = tuple[float, float, str, bool]


def _scripted(scenario: Scenario, duration_s: float) -> Iterator[_Entry]:
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
    scripted: Collection[_Entry],
) -> Iterator[_Entry]:
    """Yield drawn faults. Scripted faults count towards `overlap`, so that drawn faults leave their targets free."""
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
