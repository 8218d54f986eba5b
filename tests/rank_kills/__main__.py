"""python -m tests.rank_kills [--kills 25] [--seed 1] [--json FILE] [--folder DIR]

Kills ranks of a training in a loop: two nodes with one rank each fine-tune a net on three coordinators, and save
every few steps, Full and Incremental, with retention beside it. The seed chooses each rank and the moment of its
kill: in the middle of a step or a save, just after a commit, or during a restore. After each recovery `strata
checkpoints verify latest` must pass, and training must go on from the newest committed step. At the end every step of
every rank equals an undisturbed training bit by bit, and no process is left. The first failed check ends the run with
exit code 1, and prints the seed and the number of the kill. The folder of such a run is kept below
.strata/rank-kills. Ctrl-C ends every process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from strata.devcluster.local_cluster import LocalCluster
from strata.errors import StrataError
from tests.rank_kills.drive import ROOT, Broken, Drive
from tests.rank_kills.plan import make_plan

KEPT = ROOT / ".strata" / "rank-kills"
DETECT_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rank_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where all files go; a temporary one unless told")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    KEPT.mkdir(parents=True, exist_ok=True)
    folder = options.folder or Path(tempfile.mkdtemp(prefix=f"seed-{options.seed}-", dir=KEPT))
    try:
        report = _run(options, folder)
    except KeyboardInterrupt:
        _say("interrupted: every process has been ended")
        if options.folder is None:
            shutil.rmtree(folder)
        return 128 + signal.SIGINT
    _say(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if not report["wrong"] and options.folder is None:
        shutil.rmtree(folder)
    return 1 if report["wrong"] else 0


def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the report of a run; no process of it is left running."""
    began, wrong = time.monotonic(), []
    with LocalCluster.start(folder / "cluster", etcd_members=1, coordinators=3, detect_s=DETECT_S) as cluster:
        drive = Drive(make_plan(options.seed, options.kills), cluster, folder, f"seed-{options.seed}", _say)
        try:
            drive.run()
        except (Broken, StrataError, OSError) as error:
            wrong.append(f"seed {options.seed}, kill {drive.number} of {options.kills}: {error}")
            _say(f"{wrong[0]}\n  kept: {folder}")
        finally:
            drive.end()
    return {
        "seed": options.seed,
        "kills": drive.number,
        "met": drive.met,
        "steps": drive.steps,
        "checkpoints_seen": drive.types,
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
