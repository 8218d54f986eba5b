"""Run the benchmarks, keep each result as JSON below .strata/bench, and write docs/benchmarks.md.

    python -m benchmarks [NAME...]

Each module of this folder is one benchmark: a program that takes `--json FILE`, writes one object there (with
`benchmark`, `goal`, `met` and its own figures), and prints its result in words, the summary on the last line. A
result in `.strata/bench` stays until its benchmark runs again. A row of the page stays until this clone has a result
for the row. So the page may combine several runs, and several machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = ROOT / ".strata" / "bench"
PAGE = ROOT / "docs" / "benchmarks.md"
INTRODUCTION = (
    "Written by `python -m benchmarks`, which runs every module of `benchmarks/` and keeps each",
    "result below `.strata/bench`. Everything (etcd, coordinators, trainers) ran on one machine:",
)


def names() -> list[str]:
    """Return the names of all benchmarks."""
    return sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))


def measure(name: str) -> bool:
    """Run one benchmark and show its output; return whether it succeeded."""
    print(f"\n==> {name}", flush=True)
    result = RESULTS / f"{name}.json"
    fresh = result.with_suffix(".new")
    began = time.monotonic()
    output: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", "--json", str(fresh)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            output.append(line.strip())
    if running.returncode != 0 or not fresh.exists():
        print(f"{name} failed with exit code {running.returncode}")
        fresh.unlink(missing_ok=True)
        return False
    body: dict[str, Any] = json.loads(fresh.read_text())
    body.setdefault("summary", next((line for line in reversed(output) if line), ""))
    body["machine"] = machine()
    body["took_s"] = round(time.monotonic() - began)
    result.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")
    fresh.unlink()
    return True


def machine() -> str:
    """Return a description of the machine and the Python version, on which figures depend."""
    kind = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            kind = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({kind or platform.machine()}), Python {platform.python_version()}"


def page(results: list[dict[str, Any]], before: str = "") -> str:
    """Return the page of all results.

    A row of the page `before` stays if its benchmark still exists but has no entry in `results`: another machine or
    another clone measured the row.
    """
    rows = _rows(before)
    machines = {text.strip() for text in _machines(before).split(";") if text.strip()} if rows else set()
    for r in results:
        goal, met = _cell(r.get("goal", "-")), _met(r.get("met"))
        rows[r["benchmark"]] = f"| `{r['benchmark']}` | {_cell(r['summary'])} | {goal} | {met} |"
        machines.add(r["machine"])
    return "\n".join(
        [
            "# Benchmarks",
            "",
            *INTRODUCTION,
            "; ".join(sorted(machines)) + ".",
            "",
            "| benchmark | result | goal | met |",
            "|---|---|---|---|",
            *(row for name, row in sorted(rows.items()) if name in names()),
            "",
        ]
    )


def _rows(written: str) -> dict[str, str]:
    """Return the rows of a page by benchmark."""
    return {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*\|$", written, re.MULTILINE)}


def _machines(written: str) -> str:
    """Return the page's line about the machines."""
    _, found, rest = written.partition(INTRODUCTION[-1] + "\n")
    return rest.partition("\n")[0].removesuffix(".") if found else ""


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _met(value: object) -> str:
    return "-" if value is None else "yes" if value else "**no**"


def main() -> int:
    """Run the named benchmarks, or all, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="*", choices=[[], *names()], help="all of them by default")
    chosen = parser.parse_args().name or names()
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = [name for name in chosen if not measure(name)]
    kept = [RESULTS / f"{name}.json" for name in names()]
    results = [json.loads(path.read_text()) for path in kept if path.exists()]
    PAGE.write_text(page(results, before=PAGE.read_text() if PAGE.exists() else ""))
    print(f"\n{PAGE.relative_to(ROOT)} is written")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
