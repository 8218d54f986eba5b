"""The campaigns of `make soak`: how a turn of each is started, and how its JSON is read.

A campaign is data: a command for consecutive seeds that writes one JSON file, and a function that reads the file. A
turn is the smallest unit that is started and recorded. A turn that is cut short is not counted, and runs again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata_chaos import backends

CHAOS_S = 300.0
"""Length of the faults in a round of mixed chaos."""
CHAOS_EXTRA_S = 90.0
"""Time to start the cluster before the faults, and to judge the run after them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Consecutive seeds to run, the path for their JSON, and a folder that is kept if a seed fails."""

    first: int
    seeds: int
    json: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a turn."""

    effective: int
    seconds: float
    """Duration of the turn; for the simulation, in virtual seconds."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """The reason of each failed seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """One kind of long run."""

    name: str
    first: int
    """The seed to begin with if the ledger has none."""
    seeds: int
    """The number of seeds in a turn."""
    turn_s: float
    """About how long a turn takes on two cores. A turn begins only if it would not end long after the time is over."""
    command: Callable[[Turn], list[str]]
    outcome: Callable[[Mapping[str, Any], Turn], Outcome]
    again: str
    """The command that repeats `{seed}`."""
    beside: bool = False
    """Whether it runs in parallel with the other campaigns, on the processor time that they leave idle."""


def _simulation(turn: Turn) -> list[str]:
    seeds = ("--first", str(turn.first), "--seeds", str(turn.seeds), "--jobs", "1")
    return [sys.executable, "-m", "tests.sim", *seeds, "--json", str(turn.json)]


def _simulation_outcome(printed: Mapping[str, Any], turn: Turn) -> Outcome:
    if printed["seeds"] != turn.seeds:
        raise ValueError(f"{printed['seeds']} of {turn.seeds} seeds ran")
    failed = {int(seed): wrong[0] for seed, wrong in printed["failed"].items()}
    return Outcome(sum(printed["effective"].values()), printed["virtual_s"], failed)


def _schedules(turn: Turn) -> list[str]:
    seeds = ("--first", str(turn.first), "--seeds", str(turn.seeds))
    return [sys.executable, "-m", "tests.schedules", *seeds, "--json", str(turn.json)]


def _schedules_outcome(printed: Mapping[str, Any], turn: Turn) -> Outcome:
    failed = {int(seed): "; ".join(broken) for seed, broken in printed["failed"].items()}
    return Outcome(sum(printed["deeds"].values()), printed["took_s"], failed)


def _crashes(turn: Turn) -> list[str]:
    options = ("--seed", str(turn.first), "--rounds", "2", "--folder", str(turn.folder / "saved"))
    return [sys.executable, "-m", "tests.crashes", *options, "--json", str(turn.json)]


def _crashes_outcome(printed: Mapping[str, Any], turn: Turn) -> Outcome:
    failed = {turn.first: str(printed["wrong"][0])} if printed["wrong"] else {}
    return Outcome(printed["kills"], printed["seconds"], failed)


def _rank_kills(turn: Turn) -> list[str]:
    options = ("--seed", str(turn.first), "--folder", str(turn.folder / "run"))
    return [sys.executable, "-m", "tests.rank_kills", *options, "--json", str(turn.json)]


def _rank_kills_outcome(printed: Mapping[str, Any], turn: Turn) -> Outcome:
    failed = {turn.first: str(printed["wrong"][0])} if printed["wrong"] else {}
    return Outcome(printed["kills"], printed["seconds"], failed)


def _chaos(turn: Turn) -> list[str]:
    options = ("--scenario", "mixed", "--seed", str(turn.first), "--duration", f"{CHAOS_S:g}")
    command = [sys.executable, "-m", "strata_chaos", "run", *options, "--backend", chaos_backend()]
    # The report goes to the standard output: a shell redirects it to the file that other campaigns write.
    out = ("--out", str(turn.folder / "runs"), "--json")
    return ["/bin/sh", "-c", 'out="$1"; shift; exec "$@" >"$out"', "sh", str(turn.json), *command, *out]


def _chaos_outcome(printed: Mapping[str, Any], turn: Turn) -> Outcome:
    if printed["cut_short"]:
        raise ValueError("the round was cut short")
    effective = sum(row["effective"] for row in printed["faults"])
    failed = (
        {} if printed["verdict"] == "pass" else {turn.first: printed["sentence"]}
    )  # the turn also fails if the verdict is unknown
    return Outcome(effective, printed["duration_s"], failed)


def chaos_backend() -> str:
    """Return the chaos backend: network namespaces if this machine and user can have them."""
    return "process" if backends.ALL["netns"].available() else "netns"


SIMULATION = Campaign(
    name="simulation",
    first=1,
    seeds=100,
    turn_s=90.0,
    command=_simulation,
    outcome=_simulation_outcome,
    again="python -m tests.sim --seed {seed} --trace",
    beside=True,
)
SCHEDULES = Campaign(
    name="schedules",
    first=1,
    seeds=3,
    turn_s=90.0,
    command=_schedules,
    outcome=_schedules_outcome,
    again="python -m tests.schedules --seed {seed} --verbose",
)
CRASHES = Campaign(
    name="crashes",
    first=1,
    seeds=1,
    turn_s=30.0,
    command=_crashes,
    outcome=_crashes_outcome,
    again="python -m tests.crashes --seed {seed} --rounds 2",
)
RANK_KILLS = Campaign(
    name="rank-kills",
    first=1,
    seeds=1,
    turn_s=150.0,
    command=_rank_kills,
    outcome=_rank_kills_outcome,
    again="python -m tests.rank_kills --seed {seed}",
)
CHAOS = Campaign(
    name="chaos",
    first=1,
    seeds=1,
    turn_s=CHAOS_S + CHAOS_EXTRA_S,
    command=_chaos,
    outcome=_chaos_outcome,
    again=f"strata-chaos run --scenario mixed --seed {{seed}} --duration {CHAOS_S:g} --backend {chaos_backend()}",
)
ALL = (SIMULATION, SCHEDULES, CRASHES, RANK_KILLS, CHAOS)
