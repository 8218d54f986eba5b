"""What the coordinators are told of a checkpoint's copy in a second storage (PROTOCOLS 8.7).

It is told before the first byte is there, so that what a crash leaves goes with the record; when a
rank's part is; and when the marker is. With all of them the storage is a tier of the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from strata.checkpoint.far_copy import Replica
from strata.errors import (
    CheckpointError,
    Conflict,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
)

if TYPE_CHECKING:
    from strata.client.checkpoint_catalog import CoordinatedCatalog

TIER: Final = "replica"
"""The name of the second storage among the tiers of a record."""


class CopyReports:
    """The reports of one rank; `root` is the URI of the second storage."""

    def __init__(self, catalog: CoordinatedCatalog, *, root: str) -> None:
        self._catalog = catalog
        self._root = root

    def begun(self, replica: Replica) -> None:
        self._report(replica, begun=True)

    def part(self, replica: Replica, rank: int, digest: str) -> None:
        self._report(replica, rank=rank, digest=digest)

    def sealed(self, replica: Replica) -> None:
        self._report(replica, sealed=True, digest=replica.manifest_digest)

    def _report(self, replica: Replica, **what: Any) -> None:
        """Say it; a plain `Refused` is left to those for whom the copy is not wanted any more."""
        try:
            self._catalog.report_copy(
                step=replica.step, attempt=replica.attempt, tier=TIER, root=self._root, **what
            )
        except QuotaExceeded as error:  # by etcd, say: there may be room again
            raise Unavailable(error.message, hint=error.hint) from error
        except (Conflict, PermissionDenied, Unauthenticated) as error:
            raise CheckpointError(
                f"step {replica.step} is not copied: {error.message}", hint=error.hint
            ) from error
