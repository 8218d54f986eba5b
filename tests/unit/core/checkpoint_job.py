"""A job in one world, and its saves, made by the core's pure functions alone."""

from __future__ import annotations

from typing import Any

from strata.core.checkpoints.lifecycle import (
    AckRequest,
    Author,
    BeginRequest,
    SealRequest,
    decide_abort,
    decide_ack,
    decide_begin,
    decide_close,
    decide_commit,
    decide_seal,
    find,
)
from strata.core.ids import AttemptId
from strata.core.kv.records import CheckpointRecord, CheckpointState, CheckpointType
from tests.not_none import not_none
from tests.unit.core.rig import Store, author_of, carry_out, lead, leave, register

ROOT = "file:///data"


class Job:
    """A job of workers a (2 ranks) and b (1 rank), in one world."""

    def __init__(self, **slots: int) -> None:
        self.store = Store()
        self.epoch = lead(self.store)
        workers = slots or {"a": 2, "b": 1}
        limits = {
            "min_workers": len(workers),
            "max_workers": len(workers),
            "max_no_progress_generations": 1000,
        }
        for name, count in workers.items():
            register(self.store, name, slots=count, **limits)
        carry_out(self.store, self.epoch, settled=True)

    def author(self, rank: int) -> Author:
        return author_of(self.store.job(), rank)

    def begin(self, rank: int = 0, step: int = 20, attempt: str = "x", **more: Any) -> CheckpointRecord:
        author = more.pop("author", None) or self.author(rank)
        request = BeginRequest(
            **{
                "author": author,
                "step": step,
                "type": CheckpointType.FULL,
                "root": ROOT,
                "attempt": AttemptId(attempt),
                **more,
            }
        )
        self.store.settle(lambda job: decide_begin(job, request, now_unix_ms=7))
        return not_none(self.store.job().checkpoint(step, author.generation)).record

    def ack(self, rank: int, step: int = 20, attempt: str = "x", digest: str = "", **more: Any) -> None:
        request = AckRequest(
            author=more.pop("author", None) or self.author(rank),
            step=step,
            attempt=attempt,
            digest=digest or f"d{rank}",
            size_bytes=5,
        )
        self.store.settle(lambda job: decide_ack(job, request))

    def seal(self, step: int = 20, attempt: str = "x", digest: str = "m", parts: str = "") -> None:
        request = SealRequest(
            author=self.author(0),
            step=step,
            attempt=attempt,
            digest=digest,
            size_bytes=15,
            model_hash="h",
            part_digests=tuple(parts.split()),
        )
        self.store.settle(lambda job: decide_seal(job, request))

    def abort(self, rank: int = 0, step: int = 20, attempt: str = "x") -> None:
        author = self.author(rank)
        self.store.settle(
            lambda job: decide_abort(job, author=author, step=step, attempt=attempt, reason="disk full")
        )

    def commit(self) -> list[CheckpointRecord]:
        """Commit all complete saves, as every replica does on a change; return the committed records."""
        for entry in self.store.job().checkpoints():
            decision = decide_commit(self.store.job(), entry)
            assert decision.refusal is None
            if decision.txn is not None:
                assert self.store.execute(decision.txn).succeeded
        assert self.store.problems() == []
        return [
            e.record for e in self.store.job().checkpoints() if e.record.state is CheckpointState.COMMITTED
        ]

    def save(self, step: int, attempt: str = "", **more: Any) -> CheckpointRecord:
        """Save `step` with all ranks."""
        attempt = attempt or f"x{step}"
        record = self.begin(step=step, attempt=attempt, **more)
        for rank in range(record.ranks):
            self.ack(rank, step, attempt)
        self.seal(step, attempt)
        self.commit()
        return not_none(find(self.store.job(), step, attempt)).record

    def saves(self, *steps: int, **more: Any) -> None:
        """Save these steps, one after the other."""
        for step in steps:
            self.save(step, **more)

    def close(self) -> None:
        """Close the generation's open attempts, as the leader does before a new head."""
        generation = self.author(0).generation
        self.store.settle(lambda job: decide_close(job, through_generation=generation, reason="new world"))

    def next_world(self) -> None:
        """End the generation: b dies, and registers again."""
        leave(self.store, "b")
        register(self.store, "b")
        self.close()
        carry_out(self.store, self.epoch, settled=True)
