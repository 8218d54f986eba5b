"""Sharing the writing of tensors that the ranks of one save found equal by comparison.

    each rank hashes its tensors ─▶ all compare (`Exchange`) ─▶ equal: written once, in shares
                                                            └▶ different: each rank writes its own

The ranks repeat the comparison in each save, after the attempt has begun and before they write a byte of the
image. If the ranks' plans differed, the save could not be committed: every rank's manifest has the digests of all
chunks of a shared tensor, and `check_replicas` proves that the digests are the same and each chunk was written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Event
from typing import Protocol

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.save.bases import Plan, digests_of
from strata.checkpoint.save.equal_tensors import Comparison, fingerprint
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.save.replicated_tensors import is_random_state
from strata.checkpoint.save.sharding import share
from strata.checkpoint.snapshot.snapshot import Snapshot


class Exchange(Protocol):
    """The exchange of comparison messages between the ranks of one attempt."""

    @property
    def limit_bytes(self) -> int:
        """The longest message, the same on all ranks."""
        ...

    def __call__(
        self, record: CheckpointMetadata, stage: int, message: bytes, *, cancelled: Event
    ) -> Sequence[bytes]:
        """Return the message of every rank at this stage of the attempt's comparison, in the order of ranks.

        `CheckpointAborted` if the attempt is aborted or `cancelled` is set, `CheckpointError` if a rank does not
        take part, `Unavailable` if not all messages arrive in time.
        """
        ...


def share_equal(
    snapshot: Snapshot,
    plan: Plan,
    record: CheckpointMetadata,
    info: CheckpointInfo,
    *,
    exchange: Exchange,
    rank: int,
    ranks: int,
    threads: int,
) -> tuple[Snapshot, Plan]:
    """Return the snapshot with this rank's shares of the tensors equal on all `ranks`, and the plan for it.

    A rank without tensors to compare must take part, too: the others wait for its messages. Hashing begins only
    once all tensors are copied, since the trainer waits for the copy.
    """
    names = comparable(snapshot)
    if names:
        snapshot.wait(snapshot.places[names[-1]].end)
    begun_s = time.monotonic()
    found = plan.digests or digests_of(snapshot, names, threads=threads)
    specs = {name: place.spec for name, place in snapshot.places.items()}
    fingerprints = {name: fingerprint(name, specs[name], found[name]) for name in names}
    comparison = Comparison(fingerprints, limit_bytes=exchange.limit_bytes)
    while (message := comparison.message()) is not None:
        comparison.receive(exchange(record, comparison.stage, message, cancelled=info.cancelled))
    info.compared_s = time.monotonic() - begun_s
    sizes = {name: specs[name].size_bytes for name in comparison.equal}
    shares = {**snapshot.shares, **share(sizes, replica=rank, replicas=ranks)}
    return replace(snapshot, shares=shares), plan.shared(shares, specs, found)


def comparable(snapshot: Snapshot) -> list[str]:
    """Return the tensors that may be equal on all ranks, in the order of the image.

    Excluded are sharded tensors, tensors declared as replicated, and states of random generators.
    """
    return [
        name
        for name, place in snapshot.places.items()
        if place.spec.size_bytes
        and name not in snapshot.shards
        and name not in snapshot.shares
        and not is_random_state(name)
    ]
