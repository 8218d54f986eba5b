"""The ledger of long runs: the seeds tried, by commit, in the tracked file `tests/soak/ledger.tsv`.

A *span* line counts the seeds of one campaign (one kind of long run) that ran on one commit. An *open* line names one
failed seed whose fault is not fixed yet. `make soak` deletes the open line of a simulation seed that passes again.
Other campaigns are less deterministic, so their open lines are deleted by hand. A run begins after the last seed that
was tried on any commit.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

LEDGER = Path(__file__).with_name("ledger.tsv")
HEAD = (
    "# What long runs have tried (tests/soak/ledger.py). Written by `make soak`; an open line is also written by",
    "# tests/sim/seeds/test_fresh_seeds.py. Seconds are virtual ones for the simulation. `-`: none, or not known.",
    "# span\tcampaign\tfirst\tlast\tcommit\teffective faults\tseconds\tfailed seeds",
    "# open\tcampaign\tseed\tcommit\twhat broke",
)
WHY_MAX = 300
"""How many characters of a failure's sentence are kept in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive seeds of one campaign, all tried on one commit."""

    campaign: str
    first: int
    last: int
    commit: str
    effective: int = 0
    """Faults that took effect, including the kills of a crash round and the events of a schedule."""
    seconds: int = 0
    failed: tuple[int, ...] = ()

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return self.last - self.first + 1

    def line(self) -> str:
        """Return this span as a line of the file."""
        figures = (str(self.effective or "-"), str(self.seconds or "-"))
        failed = ",".join(map(str, self.failed)) or "-"
        return "\t".join(
            ("span", self.campaign, str(self.first), str(self.last), self.commit, *figures, failed)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """One seed that failed, until its fault is fixed."""

    campaign: str
    seed: int
    commit: str
    """The commit on which it failed."""
    why: str

    def line(self) -> str:
        """Return this failure as a line of the file."""
        why = " ".join(self.why.split())[:WHY_MAX].rstrip()
        return "\t".join(("open", self.campaign, str(self.seed), self.commit, why))


@dataclass(frozen=True, slots=True)
class Ledger:
    """All spans and all open failures."""

    spans: tuple[Span, ...] = ()
    open: tuple[Open, ...] = ()

    @classmethod
    def read(cls, path: Path = LEDGER) -> Ledger:
        """Return the ledger in the file; raise `ValueError` with the first line that cannot be parsed."""
        return cls.parse(path.read_text()) if path.exists() else cls()

    @classmethod
    def parse(cls, text: str) -> Ledger:
        """Return the ledger in these lines; raise `ValueError` with the first line that cannot be parsed."""
        spans, opened = [], []
        for number, line in enumerate(text.splitlines(), 1):
            match line.split("\t"):
                case [comment] if not comment or comment.startswith("#"):
                    pass
                case [comment, *_] if comment.startswith("#"):
                    pass
                case ["span", campaign, first, last, commit, effective, seconds, failed]:
                    spans.append(
                        Span(
                            campaign=campaign,
                            first=int(first),
                            last=int(last),
                            commit=commit,
                            effective=int(_figure(effective)),
                            seconds=int(_figure(seconds)),
                            failed=() if failed == "-" else tuple(map(int, failed.split(","))),
                        )
                    )
                case ["open", campaign, seed, commit, why]:
                    opened.append(Open(campaign=campaign, seed=int(seed), commit=commit, why=why))
                case _:
                    raise ValueError(f"line {number} of the ledger is no span and no open failure: {line!r}")
        return cls(tuple(spans), tuple(opened))

    def text(self) -> str:
        """Return the file's text: spans in the order of their seeds, then the open failures."""
        spans = sorted(self.spans, key=lambda span: (span.campaign, span.first))
        opened = sorted(self.open, key=lambda one: (one.campaign, one.seed))
        return "\n".join((*HEAD, *(span.line() for span in spans), *(one.line() for one in opened), ""))

    def write(self, path: Path = LEDGER) -> None:
        """Replace the file in one step: a run that is killed leaves the old file or the new one."""
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(self.text())
        new.rename(path)

    def next_seed(self, campaign: str, first: int) -> int:
        """Return the seed after the last tried seed; `first` if no seed was tried."""
        return max((span.last + 1 for span in self.spans if span.campaign == campaign), default=first)

    def with_span(self, span: Span) -> Ledger:
        """Return the ledger with one more span; merge it into the previous span if the commit is the same."""
        for at, known in enumerate(self.spans):
            if (known.campaign, known.commit, known.last + 1) == (span.campaign, span.commit, span.first):
                joined = replace(
                    known,
                    last=span.last,
                    effective=known.effective + span.effective,
                    seconds=known.seconds + span.seconds,
                    failed=known.failed + span.failed,
                )
                return replace(self, spans=(*self.spans[:at], joined, *self.spans[at + 1 :]))
        return replace(self, spans=(*self.spans, span))

    def with_open(self, failures: Iterable[Open]) -> Ledger:
        """Return the ledger with these failures open; a seed that is already open keeps its old line."""
        known = {(one.campaign, one.seed) for one in self.open}
        return replace(
            self, open=(*self.open, *(one for one in failures if (one.campaign, one.seed) not in known))
        )

    def without_open(self, campaign: str, seed: int) -> Ledger:
        """Return the ledger without this failure."""
        kept = tuple(one for one in self.open if (one.campaign, one.seed) != (campaign, seed))
        return replace(self, open=kept)


def change(how: Callable[[Ledger], Ledger], path: Path = LEDGER) -> None:
    """Read the file, change the ledger and write it back, one process at a time."""
    folder_fd = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX)
        how(Ledger.read(path)).write(path)
    finally:
        os.close(folder_fd)


def _figure(text: str) -> str:
    return "0" if text == "-" else text
