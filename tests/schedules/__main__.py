"""python -m tests.schedules --seeds 50 [--first N] [--kinds kill_rank,scale] [--json FILE] | --seed 7 --verbose

Runs random schedules, one after another, on one cluster of three coordinators, and judges each. A schedule consists
of deeds, each of a `Kind` (`tests.schedules.plan`): kill or freeze a rank, a node or the leader, scale, pause,
preempt, drain, SIGTERM. A training is *stuck* in two cases: it has made no step for two minutes after the last deed,
or a node runs on for a minute after the job was done. Such a node "did not end", which is a violation, and the record
has an event `stuck` with the node's processes. `make test-all` runs four short schedules, which together have every
kind of deed. Exit code 1 if a schedule had a violation. A failed seed's record is kept below .strata/schedules.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from strata.devcluster.local_cluster import LocalCluster
from tests.ranks.learning import reference
from tests.schedules.drive import ROOT, Drive
from tests.schedules.judge import History, judge
from tests.schedules.plan import Kind, make_plan

KEPT = ROOT / ".strata" / "schedules"
DETECT_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.schedules", description=__doc__)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10, help="of 20 steps")
    parser.add_argument("--kinds", default=",".join(Kind), help="what may happen")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print all that was said")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    kinds = frozenset(Kind(word) for word in options.kinds.split(","))
    first, count = (options.seed, 1) if options.seed is not None else (options.first, options.seeds)

    done: Counter[str] = Counter()
    failed: dict[int, list[str]] = {}
    generations = repeated = 0
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster.start(
            Path(folder) / "cluster", etcd_members=1, coordinators=3, detect_s=DETECT_S, fsync=False
        ) as cluster,
    ):
        for seed in range(first, first + count):
            plan = make_plan(seed, epochs=options.epochs, kinds=kinds)
            at = time.monotonic()
            drive = Drive(plan, cluster, Path(folder))
            try:
                history = drive.run()
            except BaseException as error:
                _keep(seed, plan, drive.history(), [f"the run was cut short: {error!r}"])
                raise
            broken = judge(history, reference(plan.epochs))
            done += drive.deeds.done
            facts = _facts(history)
            generations += facts["generations"]
            repeated += facts["repeated"]
            deeds = ", ".join(f"{kind} {n}" for kind, n in sorted(drive.deeds.done.items())) or "nothing"
            _say(
                f"seed {seed}: {'BROKEN' if broken else 'held'} in {time.monotonic() - at:.0f} s:"
                f" {plan.nodes} x {plan.slots} ranks, {deeds}; {facts['generations']} generations,"
                f" {facts['repeated']} steps repeated"
            )
            if options.verbose:
                _print(history)
            if broken:
                failed[seed] = broken
                _keep(seed, plan, history, broken)
            cluster.leader()
            for coordinator in cluster.coordinators:
                coordinator.wait_ready(30.0)
    summary = {
        "seeds": count,
        "held": count - len(failed),
        "failed": failed,
        "deeds": dict(sorted(done.items())),
        "generations": generations,
        "steps_repeated": repeated,
        "took_s": round(time.monotonic() - began),
    }
    _say(json.dumps(summary, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if failed else 0


def _facts(history: History) -> dict[str, int]:
    steps = [(e["step"], e["generation"]) for e in history.events if e["event"] == "step" and e["rank"] == 0]
    return {
        "generations": max((e["generation"] for e in history.events if e["event"] == "start"), default=0),
        "repeated": len(steps) - len({step for step, _ in steps}),
    }


def _keep(seed: int, plan: Any, history: History, broken: list[str]) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"seed-{seed}.jsonl"
    with path.open("w") as file:
        for line in (
            asdict(plan),
            {"broken": broken},
            *history.events,
            *({"event": "looked", **asdict(look)} for look in history.looked),
            *({"event": "node", **asdict(node)} for node in history.nodes),
        ):
            file.write(json.dumps(line) + "\n")
    for wrong in broken[:5]:
        _say(f"  {wrong}")
    _say(f"  its record is {path}")


def _print(history: History) -> None:
    for event in history.events:
        if event["event"] != "step":
            _say(f"    {event}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
