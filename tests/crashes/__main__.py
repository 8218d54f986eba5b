"""python -m tests.crashes --rounds 50 [--seed 1] [--bytes 65536] [--json FILE] [--folder DIR]

Kills a saving process at each named step of a save, once a round, and judges the storage when it is opened again. In
every second round the process dies within some milliseconds after the step's begin, in other rounds exactly at it.
Exit code 1 if anything was wrong, or if a process never reached the step at which it should die; the folder of such a
run is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.crashes.judge import complaints
from tests.crashes.program import Kill, save_and_die

MAX_LATER_US = 3000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crashes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bytes", type=int, default=64 << 10, help="of the state")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary one unless told")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="crashes-"))
    began, wrong, kills, missed = time.monotonic(), [], Counter[str](), 0
    steps = _steps(folder / "whole", options.bytes)
    seeded = random.Random(options.seed)
    for number in range(options.rounds):
        for run, kill in enumerate(_plan(steps, number, seeded)):
            root = folder / f"{number}-{run}"
            code, printed = _save(root, kill, options.bytes)
            if code == -signal.SIGKILL:
                kills[kill.step] += 1
            else:
                missed += 1
            found = _judged(root, printed, options.bytes)
            if code not in {0, -signal.SIGKILL}:
                found.append(f"it ended with {code}")
            if code == 0 and kill.after_us is None:
                found.append("it was to die there, and never came to it")
            if found:
                wrong.append({"kill": asdict(kill), "root": str(root), "complaints": found})
                _tell(f"{kill}: {found}")
            else:
                shutil.rmtree(root, ignore_errors=True)
        _tell(f"round {number + 1}: {kills.total()} kills, {len(wrong)} wrong")
    report = {
        "steps": steps,
        "kills": kills.total(),
        "kills_of_step": dict(kills),
        "lived_to_the_end": missed,
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2))
    sys.stdout.write(json.dumps({k: v for k, v in report.items() if k != "steps"}, indent=2) + "\n")
    if not wrong and options.folder is None:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _steps(root: Path, size_bytes: int) -> list[str]:
    """Return the steps of a process that is not killed, in order."""
    code, printed = _save(root, None, size_bytes)
    if code != 0 or (found := _judged(root, printed, size_bytes)):
        raise SystemExit(f"without any crash: code {code}, {found if code == 0 else printed}")
    shutil.rmtree(root)
    return [line.removeprefix("step ") for line in printed if line.startswith("step ")]


def _plan(steps: Sequence[str], number: int, seeded: random.Random) -> Iterator[Kill]:
    """For each round, yield a kill at every occurrence of every step, in random order."""
    counts = Counter[str]()
    kills = []
    for step in steps:
        counts[step] += 1
        after = seeded.randrange(MAX_LATER_US) if number % 2 else None
        kills.append(Kill(step=step, nth=counts[step], after_us=after))
    seeded.shuffle(kills)
    yield from kills


def _save(root: Path, kill: Kill | None, size_bytes: int) -> tuple[int, list[str]]:
    """Run a save in a child process; return its exit code, negative for a signal, and the lines it wrote."""
    return _forked(lambda printed: save_and_die(root, kill, size_bytes, printed))


def _judged(root: Path, printed: Sequence[str], size_bytes: int) -> list[str]:
    """Return the complaints of a new process about the storage below `root`."""

    def look(out: int) -> None:
        for complaint in complaints(root, printed, size_bytes):
            os.write(out, f"{complaint}\n".encode())

    code, found = _forked(look)
    return found if code == 0 else [*found, f"the judge ended with {code}"]


def _forked(work: Callable[[int], None]) -> tuple[int, list[str]]:
    """Fork a process that runs `work` with a pipe to write to; return its exit code and the lines it wrote.

    The parent opens no storage itself: it has one thread and little memory.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(ours)
            work(theirs)
            code = 0
        except BaseException:  # noqa: BLE001  # the child must end here, and say why
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, encoding="utf-8") as printed:
        lines = printed.read().splitlines()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), lines


if __name__ == "__main__":
    sys.exit(main())
