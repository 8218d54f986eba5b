"""Barriers and saves that continue while `benchmarks.leader_failover` harms leaders.

Members of one job, each with its own session, meet at a barrier and regularly save a checkpoint, until stdin ends.
Then one line reports the numbers of rounds and saves, the failures with their reasons, and the longest round and
save.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Final

import strata
from strata import CheckpointManager

MEMBERS: Final = 3
SAVE_EVERY_S: Final = 1.0
PACE_S: Final = 0.05


@dataclass(slots=True)
class Tally:
    """How often an operation succeeded, its longest duration, and its failures."""

    done: int = 0
    longest_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def note(self, began: float) -> None:
        self.done += 1
        self.longest_s = max(self.longest_s, time.monotonic() - began)


class Member(threading.Thread):
    """One member: it makes rounds and saves until rank 0 sends the end."""

    def __init__(self, endpoints: str, root: str, number: int, stop: threading.Event) -> None:
        super().__init__(name=f"member-{number}")
        self.rounds, self.saves = Tally(), Tally()
        self.ready = threading.Event()
        self._endpoints, self._root, self._number, self._stop_requested = endpoints, root, number, stop

    def run(self) -> None:
        try:
            rank = strata.connect(
                self._endpoints, job="meanwhile", worker_id=f"m{self._number}", min_workers=MEMBERS
            )
            manager = CheckpointManager(self._root, client=rank, keep_count=2, capture_rng=False)
            self.ready.set()
            saved_at, step, over = time.monotonic(), 0, False
            while not over:
                began = time.monotonic()
                wish = (
                    b"over"
                    if self._stop_requested.is_set()
                    else b"save"
                    if began > saved_at + SAVE_EVERY_S
                    else b""
                )
                wishes = rank.barrier("step", payload=wish)
                self.rounds.note(began)
                over = wishes.get(0) == b"over"
                if wishes.get(0) == b"save":  # rank 0 decides for all
                    saved_at, step = began, step + 1
                    began = time.monotonic()
                    manager.save(b"x" * 100_000, step=step).wait(60.0)
                    self.saves.note(began)
                time.sleep(PACE_S)
            manager.close()
            rank.close()
        except Exception as error:  # noqa: BLE001  # any error is a failure to report
            self.rounds.failures.append(f"{type(error).__name__}: {error}")
        finally:
            self.ready.set()


def main() -> int:
    """Run the members until stdin ends."""
    endpoints, root = sys.argv[1:]
    stop = threading.Event()
    members = [Member(endpoints, root, number, stop) for number in range(MEMBERS)]
    for member in members:
        member.start()
    for member in members:
        member.ready.wait()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    stop.set()
    for member in members:
        member.join()
    report = {
        "rounds": min(m.rounds.done for m in members),
        "saves": min(m.saves.done for m in members),
        "failures": [why for m in members for why in m.rounds.failures + m.saves.failures],
        "longest_round_s": round(max(m.rounds.longest_s for m in members), 3),
        "longest_save_s": round(max(m.saves.longest_s for m in members), 3),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
