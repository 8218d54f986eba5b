"""The steps of one rank in one save, from the snapshot to the marker.

    begin ─▶ compare ─▶ image ─▶ rank manifest ─▶ ack ─▶ (rank 0: all acked ─▶ global manifest ─▶ seal)
                                                    └──▶ COMMITTED in the catalog ─▶ marker ─▶ committed

A step that fails for a transient reason of the storage is tried again (`retry`). Any other failure before the
commit, even before this rank has begun, aborts the attempt for all ranks, so that no rank waits for this rank. Each
step is announced to `on_step`; crash tests end the process in that callback.

torch's DCP begins saves itself and knows when all parts are complete. For such callers `part`, `ack`, `commit`,
`mark` and `abort` are the same steps one by one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from strata.checkpoint.catalog.protocol import (
    Catalog,
    CheckpointAck,
    CheckpointMetadata,
    SavePhase,
    SaveRequest,
)
from strata.checkpoint.copies.tiers import tiers_of
from strata.checkpoint.format.digest import named_digest
from strata.checkpoint.format.global_manifest import compose, identity_of, seal_of
from strata.checkpoint.format.manifest import (
    GLOBAL_NAME,
    Manifest,
    RankManifest,
    rank_manifest_name,
)
from strata.checkpoint.format.marker import read_manifest, read_rank_manifests, write_marker
from strata.checkpoint.save.bases import DamagedCheckpoints, Plan, choose
from strata.checkpoint.save.equal_tensors import LEAST_BYTES
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.save.image_writer import layout_of, write_part
from strata.checkpoint.save.retry import HoldOver, SaveRetry, first_taken
from strata.checkpoint.save.sharing import Exchange, share_equal
from strata.checkpoint.snapshot.snapshot import Snapshot
from strata.checkpoint.storage.pipeline import DEFAULT_THREADS
from strata.checkpoint.storage.place import scheme_of
from strata.checkpoint.storage.sink import OnStep, Storage, put, unobserved
from strata.core.checkpoints.lifecycle import RESTORABLE_TYPES
from strata.core.kv.records import CheckpointState, CheckpointType
from strata.errors import (
    CheckpointAborted,
    CheckpointCorrupt,
    CheckpointNotFound,
    Conflict,
    Refused,
    StorageError,
    StrataError,
    Unavailable,
)

_T = TypeVar("_T")

log: Final = logging.getLogger("strata.checkpoint")

DROPPED: Final = "dropped"
"""The prefix of the abort reason of a save that was dropped rather than failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """Saves of one rank. The wait for the other ranks may last `commit_timeout_s` plus the time for which a rank
    may hold its part (`retry`).

    `threads` threads hash and write one image. No save builds on a checkpoint in `damaged`. With an `exchange`,
    the ranks compare their tensors, and write each tensor that is equal on all ranks only once.
    """

    storage: Storage
    catalog: Catalog
    commit_timeout_s: float
    damaged: DamagedCheckpoints = field(default_factory=DamagedCheckpoints)
    threads: int = DEFAULT_THREADS
    exchange: Exchange | None = None
    on_step: OnStep = unobserved
    retry: SaveRetry = field(default_factory=SaveRetry)

    def save(self, snapshot: Snapshot, request: SaveRequest, info: CheckpointInfo) -> CheckpointMetadata:
        """Return the committed checkpoint; raise the error that ended the save."""
        chosen = partial(
            choose,
            snapshot,
            request,
            storage=self.storage,
            catalog=self.catalog,
            damaged=self.damaged,
            threads=self.threads,
        )
        try:
            self._check_cancelled(info)
            requested = self._first(info, None, chosen)
        except BaseException as error:
            if (given_up := self.fail(request, self.reason(error))) is not None:
                info.began(given_up)
            raise
        self.on_step("begin")
        record, plan = self._begin(requested, info)
        info.began(record)
        folder = self.catalog.folder(record)
        if record.state is CheckpointState.COMMITTED:
            _check_type(record, request.type, RESTORABLE_TYPES)
            # The attempt is committed already: a rank may have committed it and then failed to write the marker.
            return self.mark(record, folder, None, info)
        if record.state is not CheckpointState.OPEN:
            info.dropped = record.reason.startswith(DROPPED)
            raise CheckpointAborted(
                f"the save of step {record.step} is {record.state.value}: {record.reason}",
                hint="save it again",
            )
        try:
            _check_type(record, request.type, RESTORABLE_TYPES if request.type in RESTORABLE_TYPES else ())
            snapshot, plan = self._compared(record, snapshot, plan, info)
            record, manifest = self._to_commit(record, folder, snapshot, plan, info)
        except BaseException as error:
            # Whatever the error is, the other ranks must not wait for this rank.
            record = self.abort(record, error)
            if record.state is not CheckpointState.COMMITTED:
                info.dropped = record.reason.startswith(DROPPED)  # another rank may have aborted the save
                raise
            manifest = None
        return self.mark(record, folder, manifest, info)

    def fail(self, request: SaveRequest, reason: str) -> CheckpointMetadata | None:
        """Abort, for all ranks, a save that cannot begin here; return the aborted record, or None if the abort failed.

        Without the abort, the other ranks would wait for this rank until their timeout.
        """
        try:
            record = self.give_up(request, reason)
        except StrataError as pending_errors:  # the caller reports the first error
            log.warning(
                "the other ranks wait for step %d, which fails here: %s", request.step, pending_errors
            )
            return None
        return record if record is not None and record.state is CheckpointState.ABORTED else None

    def give_up(self, request: SaveRequest, reason: str) -> CheckpointMetadata | None:
        """Abort, for all ranks, a save that has not begun here; return the attempt's final record.

        Return None, and abort nothing, if there are no other ranks.
        """
        if self.catalog.world_size == 1:
            return None
        record = self.catalog.begin(Plan(request=request).whole().request)  # a save to abort needs no base
        return self.catalog.abort(record, reason) if record.state is CheckpointState.OPEN else record

    def _begin(self, requested: Plan, info: CheckpointInfo) -> tuple[CheckpointMetadata, Plan]:
        """Return the attempt's record, and the plan for this rank's part of it."""
        try:
            record = self._first(info, None, partial(self.catalog.begin, requested.request))
        except (Refused, CheckpointNotFound) as error:
            if requested.request.type is not CheckpointType.INCREMENTAL:
                raise
            log.info("step %d is saved whole: %s", requested.request.step, error.message)
            requested = requested.whole()
            record = self._first(info, None, partial(self.catalog.begin, requested.request))
        return record, requested.for_record(record, self.catalog.folder(record))

    def _compared(
        self, record: CheckpointMetadata, snapshot: Snapshot, chosen: Plan, info: CheckpointInfo
    ) -> tuple[Snapshot, Plan]:
        """Return the snapshot and the plan for writing only this rank's share of the tensors equal on all ranks."""
        ranks = self.catalog.world_size
        if self.exchange is None or ranks == 1 or self.exchange.limit_bytes < LEAST_BYTES:
            return snapshot, chosen
        self.on_step("compare")
        return share_equal(
            snapshot,
            chosen,
            record,
            info,
            exchange=self.exchange,
            rank=self.catalog.rank,
            ranks=ranks,
            threads=self.threads,
        )

    def mark(
        self, record: CheckpointMetadata, folder: str, manifest: Manifest | None, info: CheckpointInfo
    ) -> CheckpointMetadata:
        """Return the committed record once storage has the marker, too; read `manifest` from storage if it is None.

        If a coordinator's record proves the commit, the save is not held for a transient failure of this write: a
        restore writes the marker later.
        """
        self.on_step("mark")
        named = record.manifest_digest

        def tried(*acts: Callable[[], _T]) -> _T:
            return self._first(info, None, *acts) if self.catalog.by_marker else first_taken(acts)

        later = f"step {record.step} is committed, and has no marker until it is restored"
        with contextlib.nullcontext() if self.catalog.by_marker else self.retry.excusing(later):
            if manifest is None:
                manifest = tried(partial(read_manifest, self.storage, folder, named))
            mark = partial(_mark, folder=folder, manifest=manifest, manifest_digest=named)
            near, *others = tiers_of(self.storage)
            tried(partial(mark, near), *(partial(mark, far, proven=True) for far in others))
            self.on_step("marked")
        self.retry.committed(record.step)
        return record

    def _to_commit(
        self, record: CheckpointMetadata, folder: str, snapshot: Snapshot, plan: Plan, info: CheckpointInfo
    ) -> tuple[CheckpointMetadata, Manifest | None]:
        own, digest = self.part(record, folder, snapshot, plan, info, rank=self.catalog.rank)
        record = self.ack(record, own, digest, info)
        if self.catalog.rank == 0:
            record = self._wait(record, lambda r: not r.missing, info)
            return self.commit(record, folder, info, acked={own.rank: digest}, written={digest: own})
        return self._committed(record, info), None

    def part(
        self,
        record: CheckpointMetadata,
        folder: str,
        snapshot: Snapshot,
        plan: Plan,
        info: CheckpointInfo,
        *,
        rank: int,
    ) -> tuple[RankManifest, str]:
        """Write the image and the manifest of `rank`; return the manifest and its digest once both are durable."""
        own, written = self._write_image(record, folder, snapshot, plan, info, rank=rank)
        data = own.to_bytes()
        self._put(f"{folder}/{rank_manifest_name(rank)}", data, info, record)
        self._check_cancelled(info)
        info.phases = (*_copied(snapshot, written.backend), written)
        return own, named_digest(data)

    def ack(
        self, record: CheckpointMetadata, own: RankManifest, digest: str, info: CheckpointInfo
    ) -> CheckpointMetadata:
        """Report to the catalog that this rank's part is durable, with the phases' durations."""
        self.on_step("ack")
        ack = CheckpointAck(digest=digest, size_bytes=own.image_bytes, phases=info.phases)
        return self.catalog.ack(record, ack)

    def commit(
        self,
        record: CheckpointMetadata,
        folder: str,
        info: CheckpointInfo,
        *,
        acked: Mapping[int, str],
        written: Mapping[str, RankManifest],
    ) -> tuple[CheckpointMetadata, Manifest]:
        """Compose and seal the parts of all ranks; return once they are committed. Only one rank may call this.

        `acked` and `written` are the arguments of `compose`.
        """
        latest = self._first(info, record, self.catalog.latest)
        composed = partial(
            compose, self.storage, record, folder, predecessor=latest, acked=acked, written=written
        )
        manifest = self._first(info, record, composed)
        data = manifest.to_bytes()
        self._put(f"{folder}/{GLOBAL_NAME}", data, info, record)
        self.on_step("seal")
        record = self.catalog.seal(record, seal_of(manifest, data))
        return self._committed(record, info), manifest

    def _committed(self, record: CheckpointMetadata, info: CheckpointInfo) -> CheckpointMetadata:
        return self._wait(record, lambda r: r.state is CheckpointState.COMMITTED, info)

    def _write_image(
        self,
        record: CheckpointMetadata,
        folder: str,
        snapshot: Snapshot,
        plan: Plan,
        info: CheckpointInfo,
        *,
        rank: int,
    ) -> tuple[RankManifest, SavePhase]:

        def on_block(count_bytes: int) -> None:
            self._check_cancelled(info)
            info.advanced(count_bytes)

        self._check_cancelled(info)
        info.bytes_total = layout_of(snapshot, plan).size_bytes

        def write(storage: Storage) -> tuple[RankManifest, SavePhase]:
            info.bytes_written = 0
            begun_s = time.monotonic()  # of the successful try only: the hold measures the failed tries
            manifest = write_part(
                storage,
                folder,
                snapshot,
                plan,
                identity=identity_of(record),
                rank=rank,
                threads=self.threads,
                on_block=on_block,
            )
            return manifest, SavePhase(
                phase="write",
                backend=scheme_of(storage.uri),
                took_s=time.monotonic() - begun_s,
                size_bytes=manifest.image_bytes,
            )

        found = self._first(info, record, *(partial(write, storage) for storage in tiers_of(self.storage)))
        info.stage()
        return found

    # -- steps that are retried

    def _put(self, name: str, data: bytes, info: CheckpointInfo, record: CheckpointMetadata) -> None:
        self._first(info, record, *(partial(put, storage, name, data) for storage in tiers_of(self.storage)))

    def _first(self, info: CheckpointInfo, record: CheckpointMetadata | None, *acts: Callable[[], _T]) -> _T:
        """Return the result of the first accepted act; hold the save of `record` until then."""
        held = False

        def pause(seconds: float) -> None:
            nonlocal held
            held = True
            if record is None or self.catalog.world_size == 1:
                info.cancelled.wait(seconds)
            else:
                with contextlib.suppress(Unavailable):  # the pause is over, no rank aborted the save
                    self.catalog.wait(record, lambda _: False, timeout_s=seconds, cancelled=info.cancelled)
            self._check_cancelled(info)

        try:
            return self.retry.first(acts, step=info.step, pause=pause)
        except CheckpointAborted as error:
            if held and info.cancelled.is_set():
                raise HoldOver(error.message) from None
            raise

    def _wait(
        self,
        record: CheckpointMetadata,
        until: Callable[[CheckpointMetadata], bool],
        info: CheckpointInfo,
    ) -> CheckpointMetadata:
        timeout_s = self.commit_timeout_s + self.retry.grace_s
        return self.catalog.wait(record, until, timeout_s=timeout_s, cancelled=info.cancelled)

    def abort(self, record: CheckpointMetadata, error: BaseException) -> CheckpointMetadata:
        """Abort an attempt for all ranks; return its newest known record."""
        with contextlib.suppress(StrataError):  # the caller reports the first error
            return self.catalog.abort(record, self.reason(error))
        return record

    def reason(self, error: BaseException) -> str:
        """Return the reason for which this rank aborts a save, as the other ranks see it."""
        text = f"rank {self.catalog.rank}: {str(error) or type(error).__name__}"
        return (f"{DROPPED}: {text}" if isinstance(error, HoldOver) else text)[:1000]

    def _check_cancelled(self, info: CheckpointInfo) -> None:
        if info.cancelled.is_set():
            if info.gives_way:
                raise HoldOver(
                    f"step {info.step} was given up while the storage refused it, or the save before it"
                )
            raise CheckpointAborted(f"the save of step {info.step} was cancelled")


def _mark(
    storage: Storage, *, folder: str, manifest: Manifest, manifest_digest: str, proven: bool = False
) -> None:
    """Write the marker; with `proven`, only if the whole checkpoint is in this tier."""
    if proven:
        try:
            read_rank_manifests(storage, folder, read_manifest(storage, folder, manifest_digest))
        except CheckpointCorrupt as error:
            raise StorageError(f"{storage.uri} has not all of it: {error.message}") from error
    write_marker(storage, folder, manifest, manifest_digest)


def _copied(snapshot: Snapshot, backend: str) -> Iterator[SavePhase]:
    """Yield the phase of copying the state, if the state was copied; `backend` names the storage written to."""
    if (took_s := snapshot.copy_s) is not None:
        yield SavePhase(
            phase="snapshot", backend=backend, took_s=took_s, size_bytes=snapshot.layout.size_bytes
        )


def _check_type(
    record: CheckpointMetadata, requested: CheckpointType, fit: Collection[CheckpointType]
) -> None:
    """Raise `Conflict` unless the attempt's type satisfies the requested one."""
    if record.checkpoint_type is not requested and record.checkpoint_type not in fit:
        raise Conflict(
            f"step {record.step} is saved already, as {record.checkpoint_type.value}, not {requested.value}",
            hint="a step is saved once in a generation: save the whole state, or another step",
        )
