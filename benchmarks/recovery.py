"""Time from the kill or freeze of a rank until training goes on, compared with stock torchrun.

    python -m benchmarks.recovery [--json FILE] [--rounds 5] [--kills 3] [--calm-s 10] [--detect-s 5]

Three nodes of one rank train a small model with DistributedDataParallel over gloo. `strata run` on three coordinators
and torchrun with its c10d rendezvous alternate, `--rounds` times. In each turn `--kills` ranks are killed, one after
another, each after `--calm-s` of training. By then `strata run` has warmed up the processes of the next generation;
without this pause every kill would wait for torch's import, as under torchrun. Two times are measured:

- notified: until the other nodes' agents get the new world (Strata only: torchrun's agents log nothing)
- again: until every rank has trained a step in a new process

torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restarts sometimes fail. At the end of each
Strata turn a rank is frozen with SIGSTOP, so that its peers hang in gloo. torchrun's reaction to a freeze is observed
once, for a minute only, because gloo waits 30 minutes for a peer (the group's timeout).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from strata.devcluster.local_cluster import LocalCluster
from strata.devcluster.ports import free_ports
from tests.processes import Event, Record, Talker

ROOT = Path(__file__).resolve().parent.parent
NODES = 3
STEADY = 3
"""Steps that every rank trains before the next rank is killed or frozen."""
LIMIT_S = 120.0
FROZEN_POLL_S = 60.0
AGAIN_S = 5.0
NOTIFIED_P99_S = 1.5
FROZEN_SLACK_S = 6.0
NOTIFYING = frozenset({"world.joining", "world.waiting"})


class Training(Protocol):
    """Three nodes that train, and their output."""

    record: Record

    @abstractmethod
    def end(self) -> None:
        """Kill all processes of the training."""


def steady(
    record: Record, after: frozenset[int] = frozenset(), *, limit_s: float = LIMIT_S
) -> dict[int, int]:
    """Return the processes of all ranks, by rank, once each process trains; processes in `after` do not count."""

    def ranks(events: list[Event]) -> dict[int, int]:
        newest = {int(e["rank"]): int(e["pid"]) for e in events if e["event"] == "begin"}
        steps = [int(e["pid"]) for e in events if e["event"] == "trained"]
        trains = all(steps.count(pid) >= STEADY for pid in newest.values())
        return newest if len(newest) == NODES and trains and not after & set(newest.values()) else {}

    return record.until("three ranks that train", ranks, limit_s=limit_s)


def first_steps(record: Record, pids: Sequence[int]) -> list[float]:
    """Return when the first step of each process was received."""
    return [
        min(float(e["heard"]) for e in record.events if e["event"] == "trained" and e["pid"] == pid)
        for pid in pids
    ]


class UnderStrata:
    """`strata run` on three nodes."""

    def __init__(self, cluster: LocalCluster, folder: Path, number: int) -> None:
        self.record = Record()
        self._talkers = []
        for name in "abc"[:NODES]:
            command = [sys.executable, "-m", "strata", "run", "--endpoints", cluster.endpoints]
            command += ["--job", f"recovery-{number}", "--worker-id", name, "--min-workers", str(NODES)]
            command += ["--max-no-progress-generations", "1000", "--address", "127.0.0.1"]
            command += ["--log-format", "json", "--", *_program("strata", folder / str(number))]
            self._talkers.append(Talker(command, name=name, record=self.record, env=_environment()))

    def notified(self, after: float, victim: int) -> list[float]:
        """Return when each other node got a changed world; worlds up to the moment `after` do not count."""
        source = next(e["source"] for e in self.record.of("rank.started") if e["pid"] == victim)
        first: dict[str, float] = {}
        for event in self.record.events:
            if event["event"] in NOTIFYING and event["source"] != source and event["heard"] > after:
                first.setdefault(event["source"], float(event["heard"]))
        return list(first.values())

    def end(self) -> None:
        _end(self._talkers)


class UnderTorchrun:
    """Stock torchrun on three nodes, with its rendezvous in the first node's agent."""

    def __init__(self, folder: Path) -> None:
        self.record = Record()
        folder.mkdir(parents=True)
        (port,) = free_ports(1)
        self._talkers = []
        for name in "abc"[:NODES]:
            command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
            command += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=recovery", f"--nnodes={NODES}"]
            command += ["--nproc-per-node=1", "--max-restarts=1000", "--local-addr=127.0.0.1"]
            command += _program("torchrun", folder)[1:]
            env = {**_environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            self._talkers.append(Talker(command, name=name, record=self.record, env=env))

    def end(self) -> None:
        _end(self._talkers)


def _program(kind: str, folder: Path) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / "_recovery_train.py"), kind, str(folder)]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _end(talkers: Sequence[Talker]) -> None:
    """Kill all of these processes, including frozen ones and leaders of process groups."""
    for talker in talkers:
        for pid in {talker.pid, *talker.family()}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself
    for talker in talkers:
        talker.join()
        talker.wait_quiet()


def harmed(
    training: Training, victim_rank: int, number: int, *, calm_s: float, limit_s: float = LIMIT_S
) -> tuple[float, float, int]:
    """Signal a rank's process; return the time of the signal, the seconds until all ranks train again, and the pid."""
    ranks = steady(training.record)
    time.sleep(calm_s)
    began = time.monotonic()
    os.kill(ranks[victim_rank], number)
    fresh = steady(training.record, frozenset(ranks.values()), limit_s=limit_s)
    again_s = max(first_steps(training.record, list(fresh.values()))) - began
    how = f"{type(training).__name__}: rank {victim_rank} got {signal.Signals(number).name}"
    print(f"  {how}, all train again after {again_s:.1f} s", flush=True)
    return began, again_s, ranks[victim_rank]


def strata_turn(training: UnderStrata, kills: int, calm_s: float, found: dict[str, list[float]]) -> None:
    """Kill ranks, then freeze one."""
    for number in range(kills):
        began, again_s, victim = harmed(training, number % NODES, signal.SIGKILL, calm_s=calm_s)
        found["again"].append(again_s)
        found["notified"] += [at - began for at in training.notified(began, victim)]
    _, again_s, _ = harmed(training, 1, signal.SIGSTOP, calm_s=calm_s)
    found["frozen"].append(again_s)


def torchrun_frozen(training: Training, calm_s: float) -> float | None:
    """Freeze a rank; return the seconds until all train again, or None if that takes more than a minute."""
    try:
        return harmed(training, 1, signal.SIGSTOP, calm_s=calm_s, limit_s=FROZEN_POLL_S)[1]
    except AssertionError:
        return None


def run(
    rounds: int, kills: int, calm_s: float, detect_s: float
) -> tuple[dict[str, list[float]], list[float], float | None]:
    """Return the measurements of Strata, of torchrun, and of torchrun with a frozen rank."""
    ours: dict[str, list[float]] = {"again": [], "notified": [], "frozen": []}
    theirs: list[float] = []
    theirs_frozen: float | None = None
    with tempfile.TemporaryDirectory() as name, ExitStack() as ending:
        folder = Path(name)
        cluster = LocalCluster.start(folder / "c", etcd_members=1, coordinators=3, detect_s=detect_s)
        ending.callback(cluster.kill)
        for number in range(1, rounds + 1):
            with ExitStack() as turn:
                training = UnderStrata(cluster, folder, number)
                turn.callback(training.end)
                strata_turn(training, kills, calm_s, ours)
            with ExitStack() as turn:
                baseline = UnderTorchrun(folder / f"torchrun-{number}")
                turn.callback(baseline.end)
                theirs += [
                    harmed(baseline, i % NODES, signal.SIGKILL, calm_s=calm_s)[1] for i in range(kills)
                ]
                if number == rounds:
                    theirs_frozen = torchrun_frozen(baseline, calm_s)
            print(
                f"round {number} of {rounds}: killed, again after {_some(ours['again'][-kills:])} s"
                f" (torchrun: {_some(theirs[-kills:])} s); frozen {ours['frozen'][-1]:.1f} s",
                flush=True,
            )
    return ours, theirs, theirs_frozen


def _some(seconds: Sequence[float]) -> str:
    return ", ".join(f"{s:.1f}" for s in seconds)


def distribution(seconds: Sequence[float]) -> dict[str, float]:
    """Return the figures of the table for measurements."""
    ordered = sorted(seconds)

    def percentile(p: float) -> float:
        return round(ordered[math.ceil(p * len(ordered)) - 1], 3)

    return {
        "p50_s": percentile(0.5),
        "p99_s": percentile(0.99),
        "max_s": percentile(1.0),
        "rounds": len(ordered),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the result, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--calm-s", type=float, default=10.0)
    parser.add_argument("--detect-s", type=float, default=5.0)
    args = parser.parse_args(argv)
    began = time.monotonic()
    ours, theirs, theirs_frozen = run(args.rounds, args.kills, args.calm_s, args.detect_s)
    figures: dict[str, Any] = {kind: distribution(seconds) for kind, seconds in ours.items()}
    figures["torchrun_again"] = distribution(theirs)
    ratios = sorted(b / a for a, b in zip(ours["again"], theirs, strict=True))
    ratio = statistics.median(ratios)
    frozen_s = args.detect_s + FROZEN_SLACK_S
    met = (
        figures["again"]["p99_s"] <= AGAIN_S
        and figures["notified"]["p99_s"] <= NOTIFIED_P99_S
        and figures["frozen"]["max_s"] <= frozen_s
    )
    stuck = f"not within {FROZEN_POLL_S:g} s" if theirs_frozen is None else f"{theirs_frozen:.1f} s"
    summary = (
        f"rank killed → all ranks step again p50 {figures['again']['p50_s']:.1f} s,"
        f" p99 {figures['again']['p99_s']:.1f} s"
        f" (torchrun c10d p50 {figures['torchrun_again']['p50_s']:.1f} s,"
        f" {ratio:.1f} times as long, {ratios[0]:.1f} to {ratios[-1]:.1f});"
        f" survivors notified p99 {figures['notified']['p99_s']:.2f} s;"
        f" rank frozen under gloo (detect_s {args.detect_s:g}): max {figures['frozen']['max_s']:.1f} s"
        f" (torchrun: {stuck})"
    )
    print(summary)
    result = {
        "benchmark": "recovery",
        "calm_s": args.calm_s,
        "detect_s": args.detect_s,
        **figures,
        "torchrun_frozen_s": theirs_frozen,
        "ratio_median": round(ratio, 2),
        "summary": summary,
        "goal": f"again ≤ {AGAIN_S:g} s, notified p99 ≤ {NOTIFIED_P99_S:g} s, frozen ≤ {frozen_s:g} s",
        "met": met,
        "measured_s": round(time.monotonic() - began),
        "versions": {"python": platform.python_version()},
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
