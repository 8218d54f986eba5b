"""The `Catalog` protocol: which checkpoints exist, and when one is committed.

There are two implementations: `LocalCatalog` over a storage root, and the coordinators' catalog in
`strata.client.checkpoints.catalog`. Both may be used from any thread; calls block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import Protocol

from strata.core.kv.records import CheckpointState, CheckpointType


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    """One checkpoint as the catalog knows it. `id` names the attempt, `path` is a URI.

    The first eight fields describe the checkpoint; the catalog adds the others.
    """

    id: str
    step: int
    epoch: int = 0
    path: str
    size_bytes: int = 0
    checkpoint_type: CheckpointType = CheckpointType.FULL
    model_hash: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    generation: int = 0
    state: CheckpointState = CheckpointState.OPEN
    manifest_digest: str = ""
    created_unix_ms: int = 0
    ranks: int = 1
    acked: frozenset[int] = frozenset()
    sealed: bool = False
    reason: str = ""
    latest: bool = False
    pinned: bool = False
    tags: tuple[str, ...] = ()
    base_step: int | None = None
    base_attempt: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """The sort key by which a newer checkpoint is greater than an older one."""
        return self.generation, self.step

    @property
    def missing(self) -> list[int]:
        """The ranks that have not acked."""
        return sorted(set(range(self.ranks)) - self.acked)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePhase:
    """The duration of one phase of one rank's save; only for metrics.

    `phase`: "snapshot", "write" or "copy". `backend`: the scheme of the storage that took the bytes.
    """

    phase: str
    backend: str
    took_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAck:
    """The report that one rank's part is durable: its manifest's digest, its image's size, and the phases."""

    digest: str
    size_bytes: int
    phases: tuple[SavePhase, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSeal:
    """The report that the global manifest is durable; `part_digests` are the ranks' manifests' digests, in order."""

    manifest_digest: str
    size_bytes: int
    model_hash: str
    part_digests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """The parameters of a save. `replaces` is the attempt at the same step that this rank saw fail.

    An Incremental names the attempt it builds on, and the folders of all attempts to whose images it refers.
    """

    step: int
    epoch: int = 0
    type: CheckpointType = CheckpointType.FULL
    metadata: Mapping[str, str] = field(default_factory=dict)
    replaces: str = ""
    base_step: int | None = None
    base_attempt: str = ""
    uses: frozenset[str] = frozenset()


class Catalog(Protocol):
    """The catalog as one rank uses it. Errors are `StrataError`; repeating a change is harmless."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def by_marker(self) -> bool:
        """Whether only the marker in storage proves a commit, since there are no coordinators' records."""
        ...

    def folder(self, checkpoint: CheckpointMetadata) -> str:
        """Return the attempt's folder, as a name in this rank's storage."""
        ...

    def begin(self, request: SaveRequest) -> CheckpointMetadata:
        """Begin an attempt at the step, or join the existing one, whatever its state.

        The images to which an Incremental refers must exist as long as the Incremental. `Refused` or
        `CheckpointNotFound` if the catalog cannot guarantee that: the base is not committed (any more), or the
        Incremental refers to too many other attempts. Then the rank may begin a Full.
        """
        ...

    def ack(self, checkpoint: CheckpointMetadata, ack: CheckpointAck) -> CheckpointMetadata:
        """Record that this rank's part is durable."""
        ...

    def seal(self, checkpoint: CheckpointMetadata, seal: CheckpointSeal) -> CheckpointMetadata:
        """Record that the global manifest is durable; every rank must have acked.

        `Conflict` if the seal's digest of a part differs from the digest that the part's rank acked.
        """
        ...

    def abort(self, checkpoint: CheckpointMetadata, reason: str) -> CheckpointMetadata:
        """Abort the attempt for all ranks; return its final record, which may be COMMITTED."""
        ...

    def wait(
        self,
        checkpoint: CheckpointMetadata,
        until: Callable[[CheckpointMetadata], bool],
        *,
        timeout_s: float,
        cancelled: Event,
    ) -> CheckpointMetadata:
        """Return the record once `until` returns True for it.

        `CheckpointAborted` if the attempt is aborted or `cancelled` is set, `Unavailable` after `timeout_s`.
        """
        ...

    def all(self) -> list[CheckpointMetadata]:
        """Return all checkpoints in their order, including uncommitted ones."""
        ...

    def latest(self) -> CheckpointMetadata | None:
        """Return the newest committed checkpoint that has a whole state."""
        ...

    def restore_point(self) -> CheckpointMetadata | None:
        """Return the checkpoint that this run begins from."""
        ...

    def before(self, checkpoint: CheckpointMetadata) -> CheckpointMetadata | None:
        """Return the newest good checkpoint that is older than `checkpoint` and has a whole state, or None."""
        ...

    def is_deleted(self, checkpoint: CheckpointMetadata) -> bool:
        """Return whether a checkpoint that the catalog returned earlier is deleted, or being deleted."""
        ...

    def delete(self, checkpoint: CheckpointMetadata) -> None:
        """Forbid further use of the checkpoint, so that its objects may be removed; `Refused` while it is needed."""
        ...
