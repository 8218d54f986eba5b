"""Restore: find the checkpoint, read it with every byte verified, and put it into a state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from strata.checkpoint.catalog.evidence import Folder, newer_unknown
from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.format.marker import write_marker
from strata.checkpoint.restore.reader import Lend, Loaded
from strata.checkpoint.restore.restore import restore_into
from strata.checkpoint.snapshot import rng
from strata.checkpoint.storage.sink import Storage
from strata.client.api.arguments import integer
from strata.client.checkpoints.tiers import MISSING_HINT, Damage
from strata.core.checkpoints.lifecycle import RESTORABLE_TYPES
from strata.core.kv.records import CheckpointState
from strata.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointNotFound,
    InvalidArgument,
    StorageError,
    StrataError,
)

if TYPE_CHECKING:
    from strata.client.checkpoints.root import OpenRoot

_T = TypeVar("_T")

MAX_STEP: Final = 10**12
_CORRUPT_HINT: Final = "put the damaged file back from a copy, and start the job again"
_COORDINATED_HINT: Final = (
    f"{_CORRUPT_HINT}, as long as it is not marked corrupt; else start a job of another name,"
    " from nothing or from a `strata checkpoints fork`"
)
_STANDALONE_HINT: Final = "restore() without a step takes the newest good one"

Found = Sequence[tuple[CheckpointMetadata, Loaded]]
"""Checkpoints, in order of preference."""

log: Final = logging.getLogger("strata.checkpoint")


class Loading:
    """One rank's reads of the checkpoints in `root`, into memory that `lend` returns.

    In each call, `begins` means that this rank has not trained yet.
    """

    def __init__(self, root: OpenRoot, *, lend: Lend | None = None) -> None:
        self._catalog = root.catalog
        self._storage = root.storage
        self._tiers = root.tiers
        self._upkeep = root.upkeep
        self._lend = lend

    def each(
        self, step: int | Sequence[int] | None, state: Mapping[str, Any], *, begins: bool
    ) -> list[tuple[CheckpointMetadata, Loaded]]:
        """Return the result of `one` for each step, in order; an empty list if there is no checkpoint to start from."""
        if isinstance(step, Sequence):
            if not step:
                raise InvalidArgument("restore() takes a step or several, not none")
            each = [self.one(one, state, begins=begins) for one in step]
        else:
            each = [self.one(step, state, begins=begins)]
        return [found for found in each if found is not None]

    def one(
        self, step: int | None, state: Mapping[str, Any] | None, *, begins: bool
    ) -> tuple[CheckpointMetadata, Loaded] | None:
        """Read and verify the checkpoint of `step`, or the checkpoint to start from; None if there is none."""
        if step is not None:
            found = self.find(step)
            if found.state is CheckpointState.CORRUPT:
                raise CheckpointCorrupt(f"step {step} is corrupt: {found.reason}", hint=self._corrupt_hint())
            return self._held(found, state, begins=begins)
        if not isinstance(self._catalog, LocalCatalog):
            point = self._catalog.restore_point()
            return self._held(point, state, begins=begins) if point is not None else None
        return self._newest_good(self._catalog, state)

    def _held(
        self, checkpoint: CheckpointMetadata, state: Mapping[str, Any] | None, *, begins: bool
    ) -> tuple[CheckpointMetadata, Loaded]:
        """Read a checkpoint and return it; protect it from removal during the read."""
        upkeep = self._upkeep
        with upkeep.reading(checkpoint, begins=begins) if upkeep else contextlib.nullcontext():
            try:
                return checkpoint, self._read(checkpoint, state, begins=begins)
            except (CheckpointIncomplete, CheckpointNotFound) as error:
                raise self._naming_newer(checkpoint, error) from error

    def _naming_newer(self, checkpoint: CheckpointMetadata, error: CheckpointError) -> CheckpointError:
        """Return `error`; if storage has newer checkpoints that are not in the catalog, name these checkpoints in
        `error`.

        Such checkpoints mean that the catalog is older than the storage: etcd was restored from an older
        snapshot.
        """
        newer: list[Folder] = []
        with contextlib.suppress(StrataError):
            known = {each.id for each in self._catalog.all()}
            newer = newer_unknown(self._storage, self._catalog.folder(checkpoint), known)
        if not newer or self._upkeep is None:
            return error
        steps = ", ".join(str(step) for step in sorted({each.step for each in newer}))
        return type(error)(
            f"{error.message}; newer checkpoints lie intact beside it, and the catalog does not have them: steps {steps}",
            hint="etcd was put back to an older snapshot; where etcd is reached, this adopts them:"
            f" strata controlplane restore --in-place --storage {self._storage.uri}",
        )

    def _newest_good(
        self, catalog: LocalCatalog, state: Mapping[str, Any] | None
    ) -> tuple[CheckpointMetadata, Loaded] | None:
        """Return the newest checkpoint whose every byte is as saved; log the corrupt ones."""
        corrupt: CheckpointCorrupt | None = None
        for checkpoint in reversed(catalog.all()):
            if checkpoint.checkpoint_type not in RESTORABLE_TYPES:
                continue
            try:
                if checkpoint.state is CheckpointState.CORRUPT:
                    raise CheckpointCorrupt(checkpoint.reason)
                loaded = self._read(checkpoint, state, begins=False)
            except CheckpointCorrupt as error:
                log.error("step %d is corrupt, trying the one before: %s", checkpoint.step, error.message)  # noqa: TRY400  # the reason says it all
                corrupt = corrupt or error
            else:
                if corrupt is not None:
                    log.warning("step %d is taken, which is older than the last save", checkpoint.step)
                return checkpoint, loaded
        if corrupt is not None:
            raise CheckpointCorrupt(
                f"none of the checkpoints is good; of the newest: {corrupt.message}",
                hint=f"{_CORRUPT_HINT}; if there is no copy, use another storage path: training then starts from nothing",
            ) from corrupt
        return None

    def find(self, step: int) -> CheckpointMetadata:
        """Return the newest committed checkpoint of `step`, else a CORRUPT one; `CheckpointNotFound` if there
        is none.
        """
        integer("step", step, below=MAX_STEP)
        known = self._catalog.all()
        at_step = [c for c in known if c.step == step]
        good = [c for c in at_step if c.state is CheckpointState.COMMITTED]
        if good:
            if at_step[-1].state is CheckpointState.CORRUPT:
                log.error(
                    "step %d of generation %d is corrupt, trying that of generation %d: %s",
                    step,
                    at_step[-1].generation,
                    good[-1].generation,
                    at_step[-1].reason,
                )
            return good[-1]
        if corrupt := [c for c in at_step if c.state is CheckpointState.CORRUPT]:
            return corrupt[-1]
        raise CheckpointNotFound(f"no checkpoint of step {step} is committed; there are {steps_of(known)}")

    def _read(
        self, checkpoint: CheckpointMetadata, state: Mapping[str, Any] | None, *, begins: bool
    ) -> Loaded:
        folder = self._catalog.folder(checkpoint)
        check_there(self._storage, checkpoint, folder)
        read = self._tiers.loads(checkpoint, folder, rank=self._catalog.rank, state=state, lend=self._lend)
        loaded = self.proven(checkpoint, read, begins=lambda: begins)
        if self._upkeep is not None and not self._storage.exists(f"{folder}/{MARKER}"):
            try:  # the rank that committed the checkpoint may have died before it wrote the marker
                write_marker(self._storage, folder, loaded.manifest, checkpoint.manifest_digest)
            except StorageError as error:
                log.warning("step %d stays without its marker: %s", checkpoint.step, error.message)
        return loaded

    def proven(
        self,
        checkpoint: CheckpointMetadata,
        read: Callable[[Storage], _T],
        *,
        begins: Callable[[], bool] = lambda: False,
    ) -> _T:
        """Return the result of `read` on the nearest copy whose bytes are good.

        A damaged copy is read a second time; if damaged again, it is reported to the coordinators. If no copy is
        good, raise `CheckpointCorrupt`, or `CheckpointNotFound` if the checkpoint was removed meanwhile.
        """
        folder = self._catalog.folder(checkpoint)
        damaged: list[Damage] = []

        def report(begins: Callable[[], bool] = lambda: False) -> list[str]:
            if self._upkeep is None or not damaged:
                return []
            return self._upkeep.report(checkpoint, damaged, begins=bool(_answer_or_none(begins)))

        try:
            found = self._tiers.first_good(checkpoint, folder, read, damaged)
        except CheckpointCorrupt as error:
            findings = report(begins)
            removed = _answer_or_none(lambda: self._catalog.is_deleted(checkpoint))
            if removed:
                raise CheckpointNotFound(
                    f"step {checkpoint.step} was removed while it was read",
                    hint="load again, or keep more of them: keep_count=",
                ) from error
            hint = MISSING_HINT if isinstance(error, CheckpointIncomplete) else self._corrupt_hint()
            if removed is None:
                findings.append("whether it was removed meanwhile is not known")
            raise type(error)("; ".join([error.message, *findings]), hint=error.hint or hint) from error
        except StorageError:
            report()
            raise
        report()
        return found

    def _corrupt_hint(self) -> str:
        return _COORDINATED_HINT if self._upkeep is not None else _STANDALONE_HINT


def _answer_or_none(ask: Callable[[], bool]) -> bool | None:
    """Return the answer, or None if the request fails: the caller raises the damage, not the request's error."""
    with contextlib.suppress(StrataError):
        return ask()
    return None


def check_there(storage: Storage, checkpoint: CheckpointMetadata, folder: str) -> None:
    """Raise `CheckpointNotFound` if a storage has no file of a checkpoint: an unmounted storage is no damage."""
    if not storage.exists(folder):
        raise CheckpointNotFound(
            f"step {checkpoint.step} was saved to {checkpoint.path}, and {storage.uri} has nothing of it",
            hint="give every rank, on every host, the storage path it was saved to",
        )


def steps_of(checkpoints: Sequence[CheckpointMetadata]) -> list[int]:
    """Return the steps of the committed checkpoints, in order."""
    return sorted({c.step for c in checkpoints if c.state is CheckpointState.COMMITTED})


def put_into(
    state: MutableMapping[str, Any],
    found: Found,
    *,
    of_rank_0: Collection[str],
    rank: int,
    restore_rng: bool,
) -> None:
    """Restore each key of `state` from the first checkpoint that has the key; restore the random generators, too.

    If a value does not fit, raise `CheckpointError`, naming the key or tensor, before anything is changed.
    """
    for _, loaded in found:
        loaded.check_known(state, of_rank_0, rank=rank)
    restore_into(found[0][1].saved, state, *(loaded.saved for _, loaded in found[1:]))
    if restore_rng:
        _restore_rng(found, rank)


def _restore_rng(found: Found, rank: int) -> None:
    for checkpoint, loaded in found:
        if loaded.saved.rng is None:
            continue
        if loaded.own:
            rng.restore(loaded.saved.value(loaded.saved.rng))
            return
        log.warning("step %d has no random state for rank %d", checkpoint.step, rank)
