"""python -m tests.sim --seed 17 --trace | --seeds 20000 --jobs 2 [--first N] [--json FILE]

One seed runs in this process; many seeds run in several processes. Exit code 1 if a seed fails, or if a class of
faults never took effect in a long run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from tests.sim.run import Result, as_json, run_seed
from tests.sim.seeds.batch import HASH_SEED, Summary, summary

LONG = 100
"""Number of seeds from which on every class of faults must have taken effect."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--trace", action="store_true", help="print all that happened (with --seed)")
    parser.add_argument("--seeds", type=int, default=100, help="how many to run (100)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--json", type=Path, help="write the summary here as well")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return _one(arguments.seed, trace=arguments.trace)
    return _many(range(arguments.first, arguments.first + arguments.seeds), arguments.jobs, arguments.json)


def _one(seed: int, *, trace: bool) -> int:
    result = run_seed(seed, keep_trace=trace)
    for line in result.trace:
        sys.stdout.write(line + "\n")
    body = as_json(result)
    sys.stdout.write(json.dumps(body, indent=2) + "\n")
    return 1 if result.violations else 0


def _many(seeds: range, jobs: int, to: Path | None) -> int:
    began, last = time.monotonic(), 0.0

    def each(result: Result, so_far: Summary) -> None:
        nonlocal last
        for wrong in result.violations[:1]:
            sys.stderr.write(f"seed {result.seed}: {wrong}\n")
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            rate = so_far.seeds / (last - began)
            sys.stderr.write(
                f"{so_far.seeds} of {len(seeds)} seeds, {rate:.2f}/s, {len(so_far.failed)} failed\n"
            )

    total = summary(seeds, jobs=jobs, each=each)
    sys.stdout.write(total.text() + "\n")
    if to is not None:
        to.write_text(json.dumps(total.as_json(), indent=2) + "\n")
    never = total.never() if total.seeds >= LONG else []
    for what in never:
        sys.stderr.write(f"never came about: {what}\n")
    return 1 if total.failed or never else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])
    sys.exit(main())
