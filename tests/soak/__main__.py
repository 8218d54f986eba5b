"""python -m tests.soak [--hours 2] [--only simulation,chaos] [--table]      (make soak ARGS="--hours 2")

Runs simulation seeds, schedules, crash rounds, rank kills and mixed chaos until the time is over. Each begins with
the seed after its last one in tests/soak/ledger.tsv. The run extends this file: commit it. The files of a failed seed
are kept below .strata/soak, with the command that repeats the seed, and the ledger gets an open line. Open seeds of
the simulation are tried first, and closed if they pass. Delete any other open line by hand once its fault is fixed.
Ctrl-C ends the run and prints the sums. Exit code 1 if a seed failed or a turn left no result.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import threading
import time
from functools import partial

from tests.sim.seeds import revisions
from tests.soak import campaigns
from tests.soak.campaigns import Campaign
from tests.soak.ledger import LEDGER, Ledger, change
from tests.soak.run import NO_RESULT, Soak, table

KEPT = revisions.ROOT / ".strata" / "soak"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=2.0, help="how long (2)")
    names = [campaign.name for campaign in campaigns.ALL]
    parser.add_argument("--only", default=",".join(names), help="some campaigns, separated by commas (all)")
    parser.add_argument("--table", action="store_true", help="run nothing; sum up the whole ledger")
    options = parser.parse_args()
    if not 0 < options.hours < 1000:
        parser.error(f"--hours: {options.hours:g} is not between 0 and 1000")
    chosen = [campaign for campaign in campaigns.ALL if campaign.name in options.only.split(",")]
    if unknown := sorted(set(options.only.split(",")) - set(names)):
        parser.error(f"--only: there is no campaign {unknown[0]!r}; there are {', '.join(names)}")
    ledger = Ledger.read()
    if options.table:
        _say(table(ledger.spans))
        _tell_open(ledger)
        return 0

    limit_s = options.hours * 3600
    if not any(campaign.turn_s <= limit_s for campaign in chosen):
        least = min(chosen, key=lambda campaign: campaign.turn_s)
        parser.error(f"--hours: the shortest turn ({least.name}) takes about {least.turn_s:g} s")
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.exit(1, "another run of make soak is going on in this clone\n")
        return _run(chosen, limit_s)


def _run(chosen: list[Campaign], limit_s: float) -> int:
    began = time.monotonic()
    soak = Soak(
        campaigns=chosen,
        commit=revisions.short(revisions.head()),
        ledger=LEDGER,
        kept=KEPT,
        left_s=lambda: began + limit_s - time.monotonic(),
        say=lambda text: _say(f"{(time.monotonic() - began) / 60:6.1f} min  {text}"),
    )

    def interrupt(*_: object) -> None:
        if not soak.stop.is_set():
            os.write(2, b"ending the turns that run, which may take a minute\n")
        soak.stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, interrupt)
    _try_open_seeds(soak)
    lanes = threading.Thread(target=soak.run)
    lanes.start()
    while lanes.is_alive():
        lanes.join(1.0)  # with a limit, because signals are handled between waits
    _say(
        f"\n{'interrupted' if soak.stop.is_set() else 'done'} after {(time.monotonic() - began) / 60:.0f} min"
    )
    _say(f"this run, on {soak.commit}:\n{table(soak.spans)}\n")
    ledger = Ledger.read()
    _say(f"all runs ({LEDGER.relative_to(revisions.ROOT)}):\n{table(ledger.spans)}")
    _tell_open(ledger)
    for broken in soak.broken:
        _say(f"before its time: {broken}")
    return 1 if soak.broken or any(span.failed for span in soak.spans) else 0


def _try_open_seeds(soak: Soak) -> None:
    """Close the open seeds of the simulation that hold now; each seed is deterministic."""
    for one in Ledger.read().open:
        mine = one.campaign == campaigns.SIMULATION.name and not one.why.startswith(NO_RESULT)
        if mine and not soak.stop.is_set():
            held = revisions.holds(revisions.ROOT, one.seed)
            soak.say(
                f"open seed {one.seed} of the simulation {'holds now: closed' if held else 'still fails'}"
            )
            if held:
                change(partial(Ledger.without_open, campaign=one.campaign, seed=one.seed))


def _tell_open(ledger: Ledger) -> None:
    again = {campaign.name: campaign.again for campaign in campaigns.ALL}
    for one in ledger.open:
        _say(f"open: {one.campaign} seed {one.seed}, on {one.commit}: {one.why}")
        _say(f"      again: {again.get(one.campaign, '?').format(seed=one.seed)}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
