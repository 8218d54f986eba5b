"""The copies of a checkpoint on tiers: which exist, which hosts hold their parts, which can read them (PROTOCOLS 8.7).

A save goes to one tier, the one at the record's `path`. `core.checkpoints.copies` adds further tiers.

A *shared* tier survives the loss of a host. A world can use a copy on hosts' own disks only if one host holds every
part and all ranks of the world run on that host, because a rank may need any part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from strata.core.checkpoints.references import Copy
from strata.core.job import JobView
from strata.core.kv.keys import JobKeys
from strata.core.kv.records import Ack, CheckpointRecord, Tier, TierState

PRIMARY = "primary"
"""The tier's name if the settings name none."""
BEGUN = "begun"
"""The name of a key among the reports of copies on a tier: the tier may have bytes even if no part was reported."""


def tiers_of(record: CheckpointRecord) -> Mapping[str, Tier]:
    """Return the copies by the name of their tier; a record from before tiers existed has one."""
    return record.tiers or {PRIMARY: Tier(path=record.path)}


def present_on(record: CheckpointRecord) -> list[str]:
    """Return the tiers that a committed record may be read from."""
    return [name for name, tier in tiers_of(record).items() if tier.state is TierState.PRESENT]


def home(job: JobView, record: CheckpointRecord) -> tuple[JobView, CheckpointRecord]:
    """Return the job and the record that own the bytes: for a fork, those of its source.

    Forks of forks are followed. If a record on the way is deleted, the last record found is returned.
    """
    while record.origin is not None:
        source = JobView(job.view, JobKeys(f"{job.keys.folder}{record.origin.job}/"))
        entry = source.checkpoint(record.origin.step, record.origin.generation)
        if entry is None or entry.record.attempt != record.attempt:
            break
        job, record = source, entry.record
    return job, record


def ack_of(job: JobView, record: CheckpointRecord, rank: int) -> Ack | None:
    """Return the ack of a rank of the saving world; for a fork, that of its source."""
    job, record = home(job, record)
    return job.view.record(job.keys.ack(*record.where, rank), Ack)


def hosts_of(job: JobView, record: CheckpointRecord, name: str) -> set[str]:
    """Return the hosts whose own disks hold parts of this tier; empty for a shared tier."""
    job, record = home(job, record)
    tier = tiers_of(record).get(name)
    if tier is None or tier.shared:
        return set()
    if tier.path == record.path:
        acks = (
            job.view.record(job.keys.ack(*record.where, int(rank)), Ack)
            for rank in job.view.names(job.keys.acks(*record.where))
            if rank != "seal"
        )
        return {ack.host for ack in acks if ack is not None}
    return {
        e.record.host for e in job.view.entries(job.keys.copies(*record.where, name), Copy) if e.name != BEGUN
    }


def within_reach(job: JobView, record: CheckpointRecord, hosts: Collection[str]) -> bool:
    """Return whether a world whose members run on `hosts` can read every part."""
    here = set(hosts)
    return any(
        tier.state is TierState.PRESENT
        and (tier.shared or (len(here) == 1 and hosts_of(job, record, name) == here))
        for name, tier in tiers_of(record).items()
    )
