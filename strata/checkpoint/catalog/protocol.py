"""The `Catalog` protocol: which checkpoints there are, and when one is committed.

Two implementations: `LocalCatalog` over a storage root of its own, and the one in `strata.client`
over the coordinators. Both may be used from any thread; calls block.
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

    The first eight describe it; what follows is what a catalog adds.
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
        """What tells a newer checkpoint from an older one."""
        return self.generation, self.step

    @property
    def missing(self) -> list[int]:
        """The ranks that have not acked."""
        return sorted(set(range(self.ranks)) - self.acked)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePhase:
    """What one phase of one rank's save took; for metrics alone.

    `phase`: "snapshot", "write" or "copy". `backend`: the scheme of the storage that took the bytes.
    """

    phase: str
    backend: str
    took_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAck:
    """One rank's part is durable: the digest of its manifest, the bytes of its image, and what that took."""

    digest: str
    size_bytes: int
    phases: tuple[SavePhase, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSeal:
    """The global manifest is durable. It names the ranks' manifests, in order, by `part_digests`."""

    manifest_digest: str
    size_bytes: int
    model_hash: str
    part_digests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What a save is. `replaces` is the attempt at the same step that this rank saw fail.

    An Incremental names the attempt it builds on, and the folders of all whose images it uses.
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
    """What one rank may ask. Errors are `StrataError`; all changes may be repeated."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def by_marker(self) -> bool:
        """Whether the marker in storage alone says what is committed, and no record does."""
        ...

    def folder(self, checkpoint: CheckpointMetadata) -> str:
        """Return the attempt's folder, as a name in this rank's storage."""
        ...

    def begin(self, request: SaveRequest) -> CheckpointMetadata:
        """Open the step's slot or join the attempt that holds it, whatever its state.

        The images that an Incremental uses are there as long as it is. `Refused` or
        `CheckpointNotFound` when that cannot be promised, because its base is not committed (any
        more) or uses too many others; a Full may be begun then.
        """
        ...

    def ack(self, checkpoint: CheckpointMetadata, ack: CheckpointAck) -> CheckpointMetadata:
        """Say that this rank's part is durable."""
        ...

    def seal(self, checkpoint: CheckpointMetadata, seal: CheckpointSeal) -> CheckpointMetadata:
        """Say that the global manifest is durable; every rank has acked.

        `Conflict` when it names another part than its rank acked.
        """
        ...

    def abort(self, checkpoint: CheckpointMetadata, reason: str) -> CheckpointMetadata:
        """Give the attempt up for all ranks; return it as it ended, which may be COMMITTED."""
        ...

    def wait(
        self,
        checkpoint: CheckpointMetadata,
        until: Callable[[CheckpointMetadata], bool],
        *,
        timeout_s: float,
        cancelled: Event,
    ) -> CheckpointMetadata:
        """Return the record once `until` holds for it.

        `CheckpointAborted` when the attempt is given up or `cancelled` is set, `Unavailable` after
        `timeout_s`.
        """
        ...

    def all(self) -> list[CheckpointMetadata]:
        """Return all checkpoints in their order, those not committed included."""
        ...

    def latest(self) -> CheckpointMetadata | None:
        """Return the newest committed one that holds a whole state."""
        ...

    def restore_point(self) -> CheckpointMetadata | None:
        """Return the checkpoint that this run begins from."""
        ...

    def before(self, checkpoint: CheckpointMetadata) -> CheckpointMetadata | None:
        """Return the newest good one that holds a whole state and counts less than this one; None: there is none."""
        ...

    def is_gone(self, checkpoint: CheckpointMetadata) -> bool:
        """Tell whether a checkpoint that was found is deleted, or being deleted."""
        ...

    def delete(self, checkpoint: CheckpointMetadata) -> None:
        """Forbid its use, so that its objects may be removed; `Refused` while it is needed."""
        ...
