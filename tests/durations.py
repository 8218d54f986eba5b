"""How long each test takes: recorded by every run, kept in `tests/durations.tsv`, a tracked file.

    python -m tests.durations            refuse a test above LIMIT_S without a marker (make check)
    python -m tests.durations --update   take new tests, as the last run here measured them, into the tracked file

A run of pytest writes its measurements to RECORD, which git ignores. The tracked file has the times of tests that run
one after another on an idle machine. On a slower machine, or beside other tests, a test takes longer. So a measured
time of a test that is not in the tracked file is divided by this run's slowness. The slowness is a factor: nine of
ten tests in the tracked file took at most so many times their tracked time. A time in the tracked file is never
changed: delete its line to have the test measured again. The files that take longest begin first
(`tests.side_by_side`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRACKED = Path(__file__).with_suffix(".tsv")
RECORD = ROOT / ".strata" / "durations.tsv"
HEAD = (
    "# slowest case, s\tall cases, s\tmarker\ttest function; written by `python -m tests.durations --update`"
)
LIMIT_S = 10.0
"""How long a test may take without a marker."""
WORTH_S = 1.0
"""A function whose cases take at least this long together has a line in the tracked file."""
ENOUGH = 20
"""How many tests both files must have in common for a factor; with fewer it is 1."""
MARKERS = ("campaign", "slow")
UNMARKED = "-"


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds that a test function took: its slowest case, and all its cases together."""

    slowest_s: float
    all_s: float

    def plus(self, case_s: float) -> Duration:
        """Return this duration with one more case."""
        return Duration(max(self.slowest_s, case_s), self.all_s + case_s)


Key = tuple[str, str]
"""A test function (`file::function`) and its marker. The cases of one function may have different markers."""
Durations = Mapping[Key, Duration]


class Recorder:
    """A pytest plugin: adds up the phases of each test, and replaces RECORD at the end of the run."""

    def __init__(self, path: Path = RECORD) -> None:
        self._path = path
        self._cases: dict[tuple[str, str], float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        marker = next((name for name in MARKERS if name in report.keywords), UNMARKED)
        case = (report.nodeid, marker)
        self._cases[case] = self._cases.get(case, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        measured: dict[Key, Duration] = {}
        for (nodeid, marker), case_s in self._cases.items():
            key = (nodeid.partition("[")[0], marker)
            measured[key] = measured.get(key, Duration(0.0, 0.0)).plus(case_s)
        write(measured, self._path)


def read(path: Path) -> dict[Key, Duration]:
    """Return the durations in a file; empty if there is no file."""
    found: dict[Key, Duration] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if not line.startswith("#"):
            slowest, total, marker, function = line.split("\t")
            found[function, marker] = Duration(float(slowest), float(total))
    return found


def write(durations: Durations, path: Path) -> None:
    """Replace a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{took.slowest_s:.1f}\t{took.all_s:.1f}\t{marker}\t{function}"
        for (function, marker), took in sorted(durations.items())
    ]
    new = path.with_suffix(f".{os.getpid()}.new")
    new.write_text("\n".join((HEAD, *lines, "")))
    new.rename(path)


def slowness(tracked: Durations, record: Durations) -> float:
    """Return the factor by which nine of ten tests were at most slower than the tracked file says; at least 1."""
    ratios = [record[key].all_s / took.all_s for key, took in tracked.items() if key in record]
    return max(1.0, statistics.quantiles(ratios, n=10)[-1]) if len(ratios) >= ENOUGH else 1.0


def refused(tracked: Durations, record: Durations) -> Iterator[str]:
    """Yield a sentence for each test that takes longer than LIMIT_S and has no marker."""
    factor = slowness(tracked, record)
    for (function, marker), took in sorted({**record, **tracked}.items()):
        known = (function, marker) in tracked
        slowest_s = took.slowest_s if known else took.slowest_s / factor
        if marker == UNMARKED and slowest_s > LIMIT_S:
            yield (
                f"{function} takes {slowest_s:.0f} s, more than {LIMIT_S:g} s: make it faster, or mark it slow"
                f" (then `make test` does not run it){'' if known else ', and run it again: this was measured here'}"
            )


def there(durations: Durations, root: Path = ROOT) -> dict[Key, Duration]:
    """Return the durations of the functions that are in the tree."""

    def is_there(function: str) -> bool:
        file, _, name = function.partition("::")
        path = root / file
        return path.exists() and f"def {name.rpartition('::')[2]}(" in path.read_text()

    return {key: took for key, took in durations.items() if is_there(key[0])}


def updated(tracked: Durations, record: Durations) -> dict[Key, Duration]:
    """Return the tracked durations, with new tests added and tests with a changed marker removed."""
    factor = slowness(tracked, record)
    changed = {key[0] for key, took in record.items() if key not in tracked and took.all_s >= WORTH_S}
    kept = {key: took for key, took in tracked.items() if key[0] not in changed or key in record}
    for key, took in record.items():
        kept.setdefault(key, Duration(took.slowest_s / factor, took.all_s / factor))
    return {key: took for key, took in kept.items() if took.all_s >= WORTH_S}


@cache
def file_seconds() -> Mapping[str, float]:
    """Return how long each test file takes, by the tracked file."""
    total: dict[str, float] = {}
    for (function, _), took in read(TRACKED).items():
        file = function.partition("::")[0]
        total[file] = total.get(file, 0.0) + took.all_s
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write tests/durations.tsv")
    options = parser.parse_args()
    tracked, record = read(TRACKED), there(read(RECORD))
    if options.update:
        if not record:
            sys.stderr.write("nothing was measured here: run `make test-all`, or some tests of it, first\n")
            return 1
        tracked = updated(there(tracked), record)
        write(tracked, TRACKED)
    problems = list(refused(tracked, record))
    problems += [
        f"{function} is in tests/durations.tsv and not in the tree: `python -m tests.durations --update`"
        for function, _ in sorted(tracked.keys() - there(tracked).keys())
    ]
    for problem in problems:
        sys.stdout.write(problem + "\n")
    sys.stdout.write(f"durations: {len(tracked)} test functions, {len(problems)} problems\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
