"""Random histories, restored from a backup of a random moment and from the storage as it was at the end."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest

from strata.core.checkpoints.fork import decide_rewind
from strata.core.checkpoints.lifecycle import find
from strata.core.checkpoints.order import newest
from strata.core.key_kinds import PROCESSES, UNKNOWN, kind_of
from strata.core.kv.records import CheckpointRecord, CheckpointState, CheckpointType, decode
from strata.core.restore.storage_evidence import Found
from strata.errors import StrataError
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import ROOT
from tests.unit.core.lost_etcd import LostJob, restored
from tests.unit.core.rig import JOB, carry_out, lead, register

STEPS = 25
ROOTS = (ROOT, "s3://far")


class RandomJob(LostJob):
    """A job that acts at random, and keeps a backup of its keys from a random moment."""

    def __init__(self, seed: int) -> None:
        super().__init__(10)
        self.chance = random.Random(seed)
        self.step = 10
        self.backup = self.base()
        self.backup_generation = 1
        at = self.chance.randrange(STEPS)
        acts: list[Callable[[], object]] = [
            self.saves_full, self.saves_full, self.saves_incremental, self.saves_a_part, self.leaves_open,
            self.gives_up, self.deletes, self.finishes_a_deletion, self.copies, self.pins, self.tags,
            self.another_generation, self.goes_back,
        ]  # fmt: skip
        for number in range(STEPS):
            if number == at:
                self.backup = self.base()
                self.backup_generation = self.store.live.generation()
            with contextlib.suppress(StrataError):  # some acts are refused
                self.chance.choice(acts)()

    def next_step(self) -> int:
        self.step += self.chance.randint(1, 20)
        return self.step

    def some(self, *states: CheckpointState) -> CheckpointRecord | None:
        found = [e.record for e in self.store.job().checkpoints() if e.record.state in states]
        return self.chance.choice(found) if found else None

    def saves_full(self) -> None:
        self.save(self.next_step())

    def saves_incremental(self) -> None:
        latest = not_none(self.store.job().latest()).record
        self.save(
            self.next_step(),
            type=CheckpointType.INCREMENTAL,
            base_step=latest.step,
            base_attempt=latest.attempt,
        )

    def saves_a_part(self) -> None:
        self.save(self.next_step(), type=CheckpointType.MODEL_ONLY)

    def leaves_open(self) -> None:
        step = self.next_step()
        self.begin(step=step, attempt=f"x{step}")

    def gives_up(self) -> None:
        if (record := self.some(CheckpointState.OPEN)) is not None:
            self.abort(step=record.step, attempt=record.attempt)

    def deletes(self) -> None:
        if (record := self.some(CheckpointState.COMMITTED, CheckpointState.ABORTED)) is not None:
            self.delete(record.step)

    def finishes_a_deletion(self) -> None:
        if (record := self.some(CheckpointState.DELETING)) is not None:
            for tier in list(record.tiers):
                self.delete(record.step, finished=True, tier=tier)

    def copies(self) -> None:
        if (record := self.some(CheckpointState.COMMITTED)) is not None:
            self.copy(record.step, "far")

    def pins(self) -> None:
        if (record := self.some(CheckpointState.COMMITTED)) is not None:
            self.pin(record.step)

    def tags(self) -> None:
        if (record := self.some(CheckpointState.COMMITTED)) is not None:
            self.tag(f"tag-{self.chance.randrange(3)}", record.step)

    def goes_back(self) -> None:
        record = self.some(CheckpointState.COMMITTED)
        generation = self.store.live.generation()
        if record is not None:
            self.store.settle(
                lambda job: decide_rewind(
                    job, generation=generation, step=record.step, attempt=record.attempt
                )
            )
            self.plan()
            self.step = max(self.step, record.step)


def check(job: RandomJob, base: dict[str, bytes], found: Found) -> None:
    result, store = restored(base, found)
    view, truth = store.job(), job.store.job()
    for key, value in result.values.items():
        kind = kind_of(key, JOB.root)
        assert kind is PROCESSES or (kind is not UNKNOWN and decode(kind, value))
    (restored_job,) = result.jobs
    assert restored_job.generation > max((c.generation for c in found.checkpoints), default=0)
    doomed = {
        (record.step, record.attempt)
        for key, value in base.items()
        if kind_of(key, JOB.root) is CheckpointRecord
        and (record := decode(CheckpointRecord, value)).state is CheckpointState.DELETING
    }
    for checkpoint in found.checkpoints:
        if (checkpoint.step, checkpoint.attempt) not in doomed:
            entry = not_none(find(view, checkpoint.step, checkpoint.attempt))
            assert entry.record.state is CheckpointState.COMMITTED
            assert checkpoint.path in {tier.path for tier in entry.record.tiers.values()}
    there = {checkpoint.attempt for checkpoint in found.checkpoints}
    for entry in view.checkpoints():
        assert entry.record.state is not CheckpointState.OPEN
        assert entry.record.state is not CheckpointState.COMMITTED or entry.record.attempt in there
    # the restore point is the one before the loss, if the last rewound world has saved since
    latest = truth.latest()
    if (
        latest is not None
        and latest.record.generation == latest.record.record_generation
        and latest.record.attempt in there
    ):
        expected = not_none(newest(truth)).record
        if expected.attempt in there and (expected.step, expected.attempt) not in doomed:
            assert not_none(newest(view)).record.attempt == expected.attempt
    epoch = lead(store)
    register(store, "late", min_workers=1, max_workers=1)
    carry_out(store, epoch, settled=True)
    assert store.problems() == []
    head = not_none(store.live.head()).record
    assert head.generation == restored_job.generation + 1
    if (point := newest(view)) is not None:
        assert not_none(head.restore).attempt == point.record.attempt


@pytest.mark.parametrize("seed", range(250))
def test_every_checkpoint_proven_by_storage_is_restored_from_any_backup(seed: int) -> None:
    job = RandomJob(seed)
    found = job.found(*ROOTS)
    check(job, job.backup, found)
    check(job, {}, found)
    check(job, job.base(), found)


@pytest.mark.parametrize("seed", range(150))
def test_the_restored_keys_are_sound_after_any_loss_of_storage(seed: int) -> None:
    job = RandomJob(1000 + seed)
    found = job.found(*ROOTS)
    left = tuple(checkpoint for checkpoint in found.checkpoints if job.chance.random() < 0.6)
    lost = [c.path for c in found.checkpoints if c not in left]
    damaged = {path: "a bit" for path in lost if job.chance.random() < 0.3}
    unread = {path: "busy" for path in lost if job.chance.random() < 0.2 and path not in damaged}
    worse = Found(
        roots=found.roots,
        listed=found.listed,
        checkpoints=left,
        damaged=damaged,
        unread=unread,
        generations=found.generations,
    )
    for base in (job.backup, {}, job.base()):
        result, store = restored(base, worse)
        epoch = lead(store)
        register(store, "late", min_workers=1, max_workers=1)
        carry_out(store, epoch, settled=True)
        assert store.problems() == []
        assert result.jobs[0].generation > max((c.generation for c in left), default=0)
