"""A job with checkpoints, and their maintenance after the commit, made by the core's pure functions alone."""

from __future__ import annotations

from typing import Any

from strata.core.checkpoints.copies import CopyRequest, decide_report_copy, next_tier
from strata.core.checkpoints.corruption import DamageReport, decide_report_damage, next_confirmation
from strata.core.checkpoints.lifecycle import decide_delete, find
from strata.core.checkpoints.pins import decide_open, decide_pin, decide_tag
from strata.core.checkpoints.references import Keep, Retention
from strata.core.checkpoints.retention_plan import decide_set_retention, next_tombstone
from strata.core.ids import AttemptId
from strata.core.kv.records import Ack, CheckpointRecord, CheckpointState, CheckpointType, Seal
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import Job
from tests.unit.core.rig import JOB, carry_out, leave, register


class KeptJob(Job):
    """A job, of one rank by default, that has saved these steps."""

    def __init__(self, *steps: int, **slots: int) -> None:
        super().__init__(**(slots or {"a": 1}))
        self.saves(*steps)

    def record(self, step: int, attempt: str = "") -> CheckpointRecord:
        return not_none(find(self.store.job(), step, attempt or f"x{step}")).record

    def steps(self, state: CheckpointState = CheckpointState.COMMITTED) -> list[int]:
        return [e.record.step for e in self.store.job().checkpoints() if e.record.state is state]

    def policy(self, tiers: dict[str, Keep] | None = None, **keep: Any) -> None:
        retention = Retention(keep=Keep(**keep), tiers=tiers or {})
        self.store.settle(lambda job: decide_set_retention(job, retention))

    def mark(self, now_unix_ms: int = 0) -> list[str]:
        """Confirm reports and write tombstones, as the leader does after a change; return the decisions' reasons."""
        reasons = []
        for decide in (next_confirmation, lambda job: next_tombstone(job, now_unix_ms=now_unix_ms)):
            while (decision := decide(self.store.job())).txn is not None:
                assert self.store.execute(decision.txn).succeeded, decision.reason
                reasons.append(decision.reason)
                assert len(reasons) < 100, reasons[-3:]
        self.sound()
        return reasons

    def sound(self) -> None:
        assert self.store.problems() == []

    def delete(self, step: int, *, finished: bool = False, **more: Any) -> None:
        """Mark a checkpoint deleted. If `finished`, also remove its record, as after the removal of its bytes."""
        which = {"step": step, "attempt": f"x{step}", "finished": finished, **more}
        self.store.settle(lambda job: decide_delete(job, **which))
        self.sound()

    def removed(self, step: int, **more: Any) -> None:
        """Report that a tombstone's bytes are removed."""
        self.delete(step, finished=True, **more)

    def pin(self, step: int, *, who: str = "me") -> None:
        self.store.settle(lambda job: decide_pin(job, step=step, attempt=f"x{step}", who=who, why="paper"))
        self.sound()

    def incremental(self, step: int, base: int) -> CheckpointRecord:
        return self.save(
            step, type=CheckpointType.INCREMENTAL, base_step=base, base_attempt=AttemptId(f"x{base}")
        )

    def tag(self, tag: str, step: int) -> None:
        self.store.settle(lambda job: decide_tag(job, tag=tag, step=step, attempt=f"x{step}", who="me"))
        self.sound()

    def open(self, step: int, reader: str = "r", lease: int = 7) -> None:
        self.store.state.leased.setdefault(lease, set())
        self.store.settle(
            lambda job: decide_open(
                job, step=step, attempt=f"x{step}", reader=reader, who="eval", lease=lease
            )
        )

    def reader_goes(self, lease: int = 7) -> None:
        """Let a reader's lease expire: its keys are deleted."""
        for key in sorted(self.store.state.leased[lease]):
            self.store.delete(key)

    def copy(self, step: int, tier: str = "s3", *, seal: bool = True, **more: Any) -> None:
        """Report every part of a checkpoint, and the seal, as copied to a further tier."""
        record = self.record(step)
        where = (step, record.generation, record.attempt)
        view = self.store.job().view
        for rank in (*range(record.ranks), *((None,) if seal else ())):
            held: Ack | Seal | None = (
                view.record(JOB.seal(*where), Seal)
                if rank is None
                else view.record(JOB.ack(*where, rank), Ack)
            )
            assert held is not None
            request = CopyRequest(
                step=step,
                attempt=record.attempt,
                tier=tier,
                root=f"s3://{tier}",
                rank=rank,
                digest=held.digest,
                **more,
            )
            self.store.settle(lambda job, r=request: decide_report_copy(job, r))  # type: ignore[misc]  # a bound loop variable
        while (decision := next_tier(self.store.job())).txn is not None:
            assert self.store.execute(decision.txn).succeeded
        self.sound()

    def save_and_copy(self, *steps: int) -> None:
        """Save these steps and copy them to the second tier."""
        for step in steps:
            self.save(step)
            self.copy(step)

    def damage(self, step: int, host: str = "host-a", **more: Any) -> CheckpointRecord:
        report = DamageReport(
            **{"step": step, "attempt": f"x{step}", "host": host, "reason": "a bit", **more}
        )
        self.store.settle(lambda job: decide_report_damage(job, report))
        self.sound()
        return self.record(step)

    def damage_confirmed(self, step: int, **more: Any) -> CheckpointRecord:
        """Let two hosts find the same damage."""
        self.damage(step, "host-a", **more)
        return self.damage(step, "host-b", **more)

    def another_generation(self) -> None:
        """End the generation: its only member dies, and registers again."""
        leave(self.store, "a")
        register(self.store, "a")
        self.close()
        carry_out(self.store, self.epoch, settled=True)
        self.sound()

    def plan(self) -> None:
        """Let the leader close the generation and plan until nothing is left to do."""
        self.close()
        carry_out(self.store, self.epoch, settled=True)
        self.sound()
