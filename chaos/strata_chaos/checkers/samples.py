"""Checks samples: up to a commit, a training must use every sample of an epoch exactly once (PROTOCOLS 7).

A rank records the samples of a step before it saves that step. A world that starts from a checkpoint repeats the
steps after the checkpoint, with the same samples. So a sample must belong to the same step of its epoch in every
world. If an epoch ended before the last commit that a client knows, the steps of the epoch must have used all its
samples.
"""

from __future__ import annotations

from typing import Final

from strata_chaos.checkers.findings import Findings
from strata_chaos.checkers.truth import Change, Clock, State
from strata_chaos.history import Outcome, Record, Where

RULES: Final = {
    "once": "a sample is used in one step of its epoch, whichever world does that step, and by one rank of each world",
    "none-lost": "up to the last reported commit, each epoch has used all of its samples",
}


class Samples:
    """The sample checker; its rules are in `RULES`."""

    def __init__(self) -> None:
        self.findings = Findings("samples", RULES)
        self._steps: dict[tuple[str, int, int], tuple[int, Where]] = {}
        """(job, epoch, sample) -> the step that used the sample."""
        self._ranks: dict[tuple[str, str, int, int, int, int], int] = {}
        """(job, uid, generation, epoch, step, sample) -> the rank that used the sample."""
        self._used: dict[tuple[str, int], set[int]] = {}
        """(job, epoch) -> samples used."""
        self._last: dict[tuple[str, int], tuple[int, int, Where]] = {}
        """(job, epoch) -> the epoch's last step, its length, and the line of that step."""
        self._committed: dict[str, int] = {}

    def change(self, change: Change, before: State) -> None:
        """Ignore the change: etcd has no keys about samples."""

    def lost(self, end: State) -> None:
        """Keep all counts: an epoch may extend over several lives of etcd."""

    def record(self, record: Record) -> None:
        args = record.args
        if record.op == "checkpoint.save":
            if record.outcome is Outcome.OK and record.t1 is not None and record.result.get("committed"):
                self._committed[args["job"]] = max(args["step"], self._committed.get(args["job"], 0))
        elif record.op == "training.step":
            self._step(record)

    def _step(self, record: Record) -> None:
        args = record.args
        job, epoch, step, rank = args["job"], args["epoch"], args["step"], args["rank"]
        wrong, other = "", record.where
        for sample in args["samples"]:
            before, where = self._steps.setdefault((job, epoch, sample), (step, record.where))
            by = self._ranks.setdefault(
                (job, args.get("uid", ""), args["generation"], epoch, step, sample), rank
            )
            if before != step:
                wrong, other = f"sample {sample} of epoch {epoch} in step {step}, and in step {before}", where
            elif by != rank:
                wrong = f"sample {sample} of epoch {epoch} by rank {rank} and by rank {by} of one world"
        self.findings.check("once", not wrong, f"{job} used {wrong}", record.where, other)
        self._used.setdefault((job, epoch), set()).update(args["samples"])
        if step >= self._last.get((job, epoch), (0,))[0]:
            self._last[job, epoch] = step, args["length"], record.where

    def finish(self, clock: Clock, end: State) -> None:
        ended = dict(sorted(self._last))
        for (job, epoch), (step, length, where) in self._last.items():
            if epoch == ended[job] or step > self._committed.get(job, 0):
                continue  # the epoch is not over, or no client knows a commit after the epoch's last step
            used = len(self._used[job, epoch])
            self.findings.check(
                "none-lost",
                used == length,
                f"{job} has committed step {self._committed[job]}, and epoch {epoch}, which ended at step {step},"
                f" used {used} of {length} samples",
                where,
            )
