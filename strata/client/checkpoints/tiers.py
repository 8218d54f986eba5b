"""The storage tiers of a `CheckpointManager`: one storage, or a near storage and a far storage that receives copies."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import Catalog, CheckpointMetadata
from strata.checkpoint.copies.copier import Copier
from strata.checkpoint.copies.far_copy import Replica
from strata.checkpoint.copies.tiers import FarUnreachable, TieredStorage, copies, tiers_of
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.restore.reader import Lend, Loaded, load, texts_of_ranks
from strata.checkpoint.save.bases import DamagedCheckpoints
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.storage import root
from strata.checkpoint.storage.opening import open_storage
from strata.checkpoint.storage.sink import Storage, unobserved
from strata.client.checkpoints.config import CheckpointManagerConfig
from strata.core.checkpoints.tiers import PRIMARY
from strata.core.kv.records import CheckpointState
from strata.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    ConfigError,
    Conflict,
    PermissionDenied,
    QuotaExceeded,
    StorageError,
    Unauthenticated,
    Unavailable,
)

if TYPE_CHECKING:
    from strata.client.checkpoints.catalog import CoordinatedCatalog

_T = TypeVar("_T")

TIER: Final = "replica"
"""The name of the second storage among the tiers of a record."""
MISSING_HINT: Final = "put the file back or mount it; `strata checkpoints rewind` takes a job to another step"
_TWO_HINT: Final = (
    "`strata checkpoints repair` makes a whole one of two copies that are damaged in different places"
)

log: Final = logging.getLogger("strata.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A copy that differed from the saved bytes in two reads: the name of its tier, and the difference."""

    tier: str
    complaint: str


class Tiers:
    """The storages of `config`, opened; nothing is written yet. `storage` presents all of them as one storage.

    `damaged` has the checkpoints of which a restore or the copier found a damaged copy.
    """

    def __init__(self, config: CheckpointManagerConfig, *, nonce: Callable[[], str]) -> None:
        self.storage: Storage = open_storage(config.place(), nonce=nonce)
        if (replica := config.replica()) is not None:
            far = open_storage(replica, nonce=nonce, patient=False)
            self.storage = TieredStorage(self.storage, far)
        self.damaged = DamagedCheckpoints()
        self._threads = config.io_threads
        self._others_s = config.commit_timeout_s
        self._replicator: Copier | None = None

    def claim(self, owner: str, *, folder: str = "") -> dict[str, str]:
        """Claim every root for `owner` and return the ids by URI; `ConfigError` if a root has another owner."""
        return {storage.uri: root.claim(storage, owner, folder=folder) for storage in tiers_of(self.storage)}

    def claim_again(self, owner: str) -> None:
        """Check that each root that already has an owner belongs to `owner`; else raise `ConfigError`."""
        for storage in tiers_of(self.storage):
            if root.owner_of(storage) is not None:
                root.claim(storage, owner)

    def loads(
        self,
        checkpoint: CheckpointMetadata,
        folder: str,
        *,
        rank: int,
        state: Mapping[Any, Any] | None,
        lend: Lend | None = None,
    ) -> Callable[[Storage], Loaded]:
        """Return a function that reads a copy of a checkpoint, into memory from `lend`, and verifies every byte.

        `state` determines which tensors are assembled from the parts that ranks saved.
        """
        return partial(
            load,
            folder=folder,
            manifest_digest=checkpoint.manifest_digest,
            rank=rank,
            threads=self._threads,
            state=state,
            lend=lend,
        )

    def texts_of_ranks(
        self, checkpoint: CheckpointMetadata, folder: str, path: Sequence[str]
    ) -> dict[int, str]:
        """Return the text that each rank saved at `path`, from the nearest good copy."""
        read = partial(texts_of_ranks, folder=folder, manifest_digest=checkpoint.manifest_digest, path=path)
        return self.first_good(checkpoint, folder, read, [])

    def first_good(
        self,
        checkpoint: CheckpointMetadata,
        folder: str,
        read: Callable[[Storage], _T],
        damaged: list[Damage],
    ) -> _T:
        """Return the result of `read` on the nearest copy whose bytes are good.

        A copy that fails is read a second time; if it fails again, it is added to `damaged`. `CheckpointCorrupt` names
        the damage of each copy. `FarUnreachable`: the near copy is damaged and the far storage is unreachable.
        """
        found: list[CheckpointCorrupt] = []
        for storage in copies(self.storage):
            try:
                good = self._read(checkpoint, storage, folder, read, damaged)
            except CheckpointCorrupt as error:
                found.append(error)
                self.damaged.note(folder, error.message)
            except StorageError as error:
                if not found:
                    raise
                raise FarUnreachable(
                    f"step {checkpoint.step} is not whole here ({found[0].message}), and its copy in"
                    f" {storage.uri} cannot be read: {error.message}",
                    hint=error.hint,
                    transient=error.transient,
                ) from error
            else:
                if found:
                    log.warning(
                        "step %d is taken from %s: %s", checkpoint.step, storage.uri, found[0].message
                    )
                return good
        lacking = all(isinstance(each, CheckpointIncomplete) for each in found)
        raise (CheckpointIncomplete if lacking else CheckpointCorrupt)(
            "; of the copy: ".join(each.message for each in found),
            hint=found[0].hint if len(found) == 1 else _TWO_HINT,
        ) from found[0]

    def _read(
        self,
        checkpoint: CheckpointMetadata,
        storage: Storage,
        folder: str,
        read: Callable[[Storage], _T],
        damaged: list[Damage],
    ) -> _T:
        """Return the content of one copy; if it differs from the saved bytes, read this copy alone a second time."""
        try:
            return read(storage)
        except CheckpointIncomplete:
            raise
        except CheckpointCorrupt as error:
            log.warning("step %d is read again: %s", checkpoint.step, error.message)
            first = error
        try:
            return read(_near_only(storage))
        except CheckpointIncomplete:
            raise
        except CheckpointCorrupt as error:
            if tier := self._tier_of(storage, folder):
                damaged.append(Damage(tier=tier, complaint=error.message))
            raise
        except StorageError:
            raise first from None  # a copy that cannot be read is not proven damaged

    def _tier_of(self, storage: Storage, folder: str) -> str:
        """Return the copy's tier name in the record; "" if this storage never had the checkpoint."""
        if isinstance(self.storage, TieredStorage) and storage is self.storage.far:
            return TIER
        near = _near_only(storage)
        if storage is near:
            return PRIMARY
        # hosts may have different disks at the same path: a checkpoint that was never on this disk is not damaged
        with contextlib.suppress(StorageError):
            return PRIMARY if near.exists(folder) else ""
        return ""

    # -- copying

    @property
    def two(self) -> bool:
        """Whether there is a far storage; a save must never wait for the far storage."""
        return isinstance(self.storage, TieredStorage)

    def start(self, catalog: CoordinatedCatalog | LocalCatalog, *, afterwards: Callable[[], None]) -> None:
        """Begin to copy the checkpoints that are passed to `committed`, and to report the progress; call `afterwards`
        after each turn.
        """
        if not isinstance(self.storage, TieredStorage):
            return
        near, far = self.storage.near, self.storage.far

        def missing() -> list[Replica]:
            """Return the checkpoints that earlier processes did not copy: without coordinators all of them, else only
            the restore point.
            """
            if isinstance(catalog, LocalCatalog):
                known = catalog.all()
            else:
                point = catalog.restore_point()
                known = [point] if point is not None else []
            return [
                _replica(catalog, c)
                for c in known
                if c.state is CheckpointState.COMMITTED
                and near.exists(f"{catalog.folder(c)}/{MARKER}")
                and not far.exists(f"{catalog.folder(c)}/{MARKER}")
            ]

        self._catalog = catalog
        self._replicator = Copier(
            self.storage,  # both storages: a part that the near storage refused may be only in the far one
            far,
            rank=catalog.rank,
            ranks=catalog.world_size,
            world="" if isinstance(catalog, LocalCatalog) else str(catalog.generation),
            others_s=self._others_s,
            report=unobserved if isinstance(catalog, LocalCatalog) else CopyReports(catalog, root=far.uri),
            damaged=self.damaged,
            missing=missing,
            afterwards=afterwards,
        )

    def follow(self, info: CheckpointInfo) -> None:
        """Set `info.replicated` once the checkpoint's copy is whole."""
        if self._replicator is not None:
            self._replicator.follow(info)

    def committed(self, checkpoint: CheckpointMetadata) -> None:
        """Queue a committed checkpoint for copying."""
        if self._replicator is not None:
            self._replicator.add(_replica(self._catalog, checkpoint))

    def wait(self, timeout_s: float | None) -> None:
        """Return once all committed checkpoints are copied; `StorageError` after `timeout_s`, or if other ranks' parts
        do not arrive.
        """
        if self._replicator is None:
            raise ConfigError("there is no second storage", hint="CheckpointManager(replica_path=…)")
        self._replicator.wait(timeout_s)

    def check_for_errors(self) -> None:
        """Raise, once, the error for which a checkpoint could not be copied."""
        if self._replicator is not None:
            self._replicator.check()

    def close(self) -> None:
        """Stop copying."""
        if self._replicator is not None:
            self._replicator.close()


def _near_only(storage: Storage) -> Storage:
    """Return the near one of two storages: parts that the near storage lacks are then not read from the far storage."""
    return storage.near if isinstance(storage, TieredStorage) else storage


def _replica(catalog: Catalog, checkpoint: CheckpointMetadata) -> Replica:
    return Replica(
        folder=catalog.folder(checkpoint),
        attempt=checkpoint.id,
        manifest_digest=checkpoint.manifest_digest,
        step=checkpoint.step,
    )


class CopyReports:
    """Reports of one rank's copies in the second storage, at the URI `root`, to the coordinators (PROTOCOLS 8.7).

    There are three reports: 1. before the first byte is written, 2. once the rank's part is copied, 3. once the
    marker is written. From the first report on, deleting the record also removes files that a crash left in the
    second storage. After all three, the storage is a tier of the record.
    """

    def __init__(self, catalog: CoordinatedCatalog, *, root: str) -> None:
        self._catalog = catalog
        self._root = root

    def __call__(self, replica: Replica, **what: Any) -> None:
        """Send one report; raise `Refused` itself, not a subclass, if the copy is not needed any more."""
        try:
            self._catalog.report_copy(
                step=replica.step, attempt=replica.attempt, tier=TIER, root=self._root, **what
            )
        except QuotaExceeded as error:  # for example, etcd is full now and may have space later
            raise Unavailable(error.message, hint=error.hint) from error
        except (Conflict, PermissionDenied, Unauthenticated) as error:
            raise CheckpointError(
                f"step {replica.step} is not copied: {error.message}", hint=error.hint
            ) from error
