"""The coordinators' catalog, accessed by one rank over its session.

Every request is idempotent, and is repeated for up to `save_wait_s`: while no coordinator answers, a due save waits
that long and then fails. The catalog also takes the records that the session pushes. Because a push may be lost with
a connection, a waiting caller also requests the record every few seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from threading import Condition, Event
from typing import Any, Final

from google.protobuf.message import Message

from strata.checkpoint.catalog.protocol import (
    CheckpointAck,
    CheckpointMetadata,
    CheckpointSeal,
    SavePhase,
    SaveRequest,
)
from strata.client.checkpoints.port import SessionPort
from strata.core.checkpoints.lifecycle import folder_name
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointAborted, CheckpointNotFound, Conflict, Unavailable
from strata.v1.checkpoints_pb2 import (
    AbortCheckpointRequest,
    AckCheckpointRequest,
    BeginCheckpointRequest,
    Checkpoint,
    DeleteCheckpointRequest,
    GetCheckpointRequest,
    ListCheckpointsRequest,
    ReportCopyRequest,
    SealCheckpointRequest,
)
from strata.v1.common_pb2 import Author
from strata.v1.common_pb2 import SavePhase as SavePhaseMessage
from strata.wire.enums import CHECKPOINT_STATES, CHECKPOINT_TYPES, from_wire
from strata.wire.pages import whole

SYNC_BARRIER: Final = "strata.checkpoint.sync"
RETRY_S: Final = 2.0
"""Seconds between two requests of a waiting caller, in case a push was lost."""
POLL_S: Final = 0.25
"""Seconds between two checks whether a waiting save was cancelled."""
MOST_SEEN: Final = 64
"""The number of (generation, step) pairs whose newest record is cached: many more than are saved at the same time."""
ABORT_S: Final = 10.0
REPORT_S: Final = 10.0


class CoordinatedCatalog:
    """A `Catalog` over `port`, for saves below the storage root `root_uri`.

    `new_id` returns a new random attempt id.
    """

    by_marker = False

    def __init__(
        self,
        port: SessionPort,
        *,
        root_uri: str,
        new_id: Callable[[], str],
        save_wait_s: float,
        retry_s: float = RETRY_S,
    ) -> None:
        self._port = port
        self._root_uri = root_uri
        self._new_id = new_id
        self._save_wait_s = save_wait_s
        self.stands: Callable[[], bool] = lambda: False
        """Returns whether this rank waits for coordinators without a time limit, to outlast an outage of any length."""
        self._retry_s = retry_s
        self._news = Condition()
        self._seen: dict[tuple[int, int], Checkpoint] = {}
        self._stop_observing = port.observe_checkpoints(self._observe)

    def close(self) -> None:
        """Stop observing. Idempotent."""
        stop, self._stop_observing = self._stop_observing, lambda: None
        stop()

    @property
    def rank(self) -> int:
        return self._port.rank

    @property
    def world_size(self) -> int:
        return self._port.world_size

    @property
    def job(self) -> str:
        return self._port.job

    @property
    def generation(self) -> int:
        return self._port.generation

    def observe(self, callback: Callable[[Checkpoint], None]) -> Callable[[], None]:
        """Call `callback` with each pushed record, in the session's thread; return a function that removes it."""
        return self._port.observe_checkpoints(callback)

    def look_up(self, checkpoint: CheckpointMetadata) -> Checkpoint:
        """Return the current record of a checkpoint; raise `StaleGeneration` once this generation is over."""
        message = GetCheckpointRequest(job=self._port.job, step=checkpoint.step, attempt=checkpoint.id)
        with _begun(checkpoint):
            found: Checkpoint = self.ask(message, wait_s=self._retry_s).checkpoint
        self._learn(found)
        return found

    def folder(self, checkpoint: CheckpointMetadata) -> str:
        """Return a checkpoint's folder. A fork (a checkpoint taken over from another job) keeps its bytes in that
        job's folder, as its path shows.
        """
        root = f"{self._root_uri.rstrip('/')}/"
        if checkpoint.path.startswith(root):
            return checkpoint.path.removeprefix(root)
        name = folder_name(checkpoint.step, checkpoint.generation, checkpoint.id)
        return f"{self._port.job}/{name}"

    # -- saving

    def meet(self, timeout_s: float) -> None:
        """Return once every rank has arrived; `BarrierTimeout` names the ranks missing `timeout_s` after the first
        arrival.
        """
        self._port.barrier(SYNC_BARRIER, timeout_s=timeout_s)

    def begin(self, request: SaveRequest) -> CheckpointMetadata:
        message = BeginCheckpointRequest(
            job=self._port.job,
            author=self.author(),
            step=request.step,
            epoch=request.epoch,
            type=CHECKPOINT_TYPES[request.type],
            root=self._root_uri,
            metadata=request.metadata,
            attempt=self._new_id(),
            replaces=request.replaces,
            base_step=request.base_step or 0,
            base_attempt=request.base_attempt,
        )
        return self._learn(self.ask(message).checkpoint)

    def ack(self, checkpoint: CheckpointMetadata, ack: CheckpointAck) -> CheckpointMetadata:
        message = AckCheckpointRequest(
            job=self._port.job,
            author=self.author(),
            step=checkpoint.step,
            attempt=checkpoint.id,
            digest=ack.digest,
            size_bytes=ack.size_bytes,
            phases=map(phase_message, ack.phases),
        )
        with _begun(checkpoint):
            return self._learn(self.ask(message).checkpoint)

    def seal(self, checkpoint: CheckpointMetadata, seal: CheckpointSeal) -> CheckpointMetadata:
        message = SealCheckpointRequest(
            job=self._port.job,
            author=self.author(),
            step=checkpoint.step,
            attempt=checkpoint.id,
            manifest_digest=seal.manifest_digest,
            size_bytes=seal.size_bytes,
            model_hash=seal.model_hash,
            part_digests=seal.part_digests,
        )
        with _begun(checkpoint):
            return self._learn(self.ask(message).checkpoint)

    def abort(self, checkpoint: CheckpointMetadata, reason: str) -> CheckpointMetadata:
        message = AbortCheckpointRequest(
            job=self._port.job,
            author=self.author(),
            step=checkpoint.step,
            attempt=checkpoint.id,
            reason=reason,
        )
        try:
            return self._learn(self.ask(message, wait_s=ABORT_S).checkpoint)
        except Conflict:  # the checkpoint is committed
            return metadata_of(self.look_up(checkpoint))

    def wait(
        self,
        checkpoint: CheckpointMetadata,
        until: Callable[[CheckpointMetadata], bool],
        *,
        timeout_s: float,
        cancelled: Event,
    ) -> CheckpointMetadata:
        slot = checkpoint.step, checkpoint.generation
        deadline = time.monotonic() + timeout_s
        requested_s = time.monotonic()
        current = checkpoint
        while True:
            with self._news:
                seen = self._seen.get(slot)
                current = metadata_of(seen) if seen is not None else current
                _check_attempt(current, checkpoint)
                if until(current):
                    return current
                if cancelled.is_set():
                    raise CheckpointAborted(f"the save of step {checkpoint.step} was cancelled")
                self._news.wait(POLL_S)
            now = time.monotonic()
            if now >= deadline and not self.stands():
                raise Unavailable(
                    f"step {checkpoint.step} is not committed after {timeout_s:g} s: {_waiting_for(current)}"
                )
            if now - requested_s >= self._retry_s:
                requested_s = now
                with contextlib.suppress(Unavailable):
                    self.look_up(checkpoint)

    def look(self, checkpoint: CheckpointMetadata) -> CheckpointMetadata:
        """Return the coordinators' record of an attempt in progress; if no coordinator answers, the last known
        record.

        Raise `CheckpointAborted` if the attempt was aborted or replaced.
        """
        current = checkpoint
        with contextlib.suppress(Unavailable):
            current = metadata_of(self.look_up(checkpoint))
        _check_attempt(current, checkpoint)
        return current

    # -- reading

    def all(self) -> list[CheckpointMetadata]:
        answer = whole(self.ask, ListCheckpointsRequest(job=self._port.job))
        return sorted(map(metadata_of, answer.checkpoints), key=lambda c: c.order)

    def latest(self) -> CheckpointMetadata | None:
        try:
            answer = self.ask(GetCheckpointRequest(job=self._port.job, latest=True))
        except CheckpointNotFound:
            return None
        return metadata_of(answer.checkpoint)

    def before(self, checkpoint: CheckpointMetadata) -> CheckpointMetadata | None:
        """Return the newest good checkpoint that is older than `checkpoint` and not superseded, or None."""
        request = GetCheckpointRequest(
            job=self._port.job, step=checkpoint.step, attempt=checkpoint.id, before=True
        )
        try:
            found = metadata_of(self.ask(request, wait_s=ABORT_S).checkpoint)
        except CheckpointNotFound:
            return None
        if found.id == checkpoint.id:
            raise Unavailable("the coordinator does not know the checkpoint before this one yet")
        return found

    def is_deleted(self, checkpoint: CheckpointMetadata) -> bool:
        try:
            state = metadata_of(self.look_up(checkpoint)).state
        except CheckpointAborted:
            return True
        return state is CheckpointState.DELETING

    def restore_point(self) -> CheckpointMetadata | None:
        """Return the checkpoint that this rank's generation starts from; needs no coordinator."""
        point = self._port.restore_point
        if point is None or not point.attempt:
            return None
        return CheckpointMetadata(
            id=point.attempt,
            step=point.step,
            generation=point.record_generation,
            path=point.path,
            state=CheckpointState.COMMITTED,
            manifest_digest=point.manifest_digest,
        )

    # -- deleting

    def delete(self, checkpoint: CheckpointMetadata) -> None:
        self.ask(
            DeleteCheckpointRequest(
                job=self._port.job, step=checkpoint.step, attempt=checkpoint.id, finished=False
            )
        )

    # -- copies

    def report_copy(self, *, phase: SavePhase | None = None, **copy: Any) -> None:
        """Report the progress and times of a copy in another storage; `copy` has the fields of `ReportCopyRequest`.

        Raise `Refused` or `CheckpointNotFound` if the copy is not needed any more, `Unavailable` if no
        coordinator answers.
        """
        took = phase_message(phase) if phase is not None else None
        self.ask(ReportCopyRequest(job=self._port.job, phase=took, **copy), wait_s=REPORT_S)

    # -- inside

    def author(self) -> Author:
        """Return the identity of this rank in its generation."""
        port = self._port
        return Author(
            worker_id=port.worker_id,
            incarnation=port.incarnation,
            generation=port.generation,
            rank=port.rank,
        )

    def ask(self, request: Message, *, wait_s: float | None = None) -> Any:
        """Return the response to any request of this job, repeating the request while no coordinator can answer.

        Raise `Unavailable` if no response came within `wait_s`. Without `wait_s` the limit is `save_wait_s`, or no
        limit while `stands()` is true.
        """
        deadline = time.monotonic() + (self._save_wait_s if wait_s is None else wait_s)
        while True:
            left_s = deadline - time.monotonic()
            try:
                return self._port.call(request, timeout_s=max(left_s, POLL_S))
            except Unavailable:
                if deadline - time.monotonic() <= POLL_S:
                    if wait_s is not None or not self.stands():
                        raise
                    deadline += self._save_wait_s
            with self._news:
                self._news.wait(POLL_S)

    def _observe(self, checkpoint: Checkpoint) -> None:
        self._learn(checkpoint)

    def _learn(self, news: Checkpoint) -> CheckpointMetadata:
        """Take a pushed or requested record unless a newer record is known; return the newest known record.

        An ack does not change the record's revision. So of two records with the same revision, the record received
        later counts. If an ack is missing in that record, the waiting caller requests the record again.
        """
        slot = news.step, news.generation
        with self._news:
            known = self._seen.get(slot)
            if known is None or news.mod_revision >= known.mod_revision:
                known = self._seen[slot] = news
                while len(self._seen) > MOST_SEEN:
                    del self._seen[next(iter(self._seen))]
            self._news.notify_all()
        return metadata_of(known)


@contextlib.contextmanager
def _begun(checkpoint: CheckpointMetadata) -> Iterator[None]:
    """Turn `CheckpointNotFound` into `CheckpointAborted`: the attempt was begun, and no longer exists."""
    try:
        yield
    except CheckpointNotFound:
        raise CheckpointAborted(
            f"attempt {checkpoint.id} of step {checkpoint.step} was replaced or deleted"
        ) from None


def phase_message(phase: SavePhase) -> SavePhaseMessage:
    return SavePhaseMessage(
        phase=phase.phase,
        backend=phase.backend,
        took_us=round(1e6 * phase.took_s),
        size_bytes=phase.size_bytes,
    )


def metadata_of(message: Checkpoint) -> CheckpointMetadata:
    """Return a catalog record as the library's `CheckpointMetadata`."""
    return CheckpointMetadata(
        id=message.attempt,
        step=message.step,
        generation=message.generation,
        path=message.path,
        state=from_wire(CHECKPOINT_STATES, message.state),
        checkpoint_type=from_wire(CHECKPOINT_TYPES, message.type),
        epoch=message.epoch,
        size_bytes=message.size_bytes,
        model_hash=message.model_hash,
        metadata=dict(message.metadata),
        manifest_digest=message.manifest_digest,
        created_unix_ms=message.created_unix_ms,
        ranks=message.ranks,
        acked=frozenset(message.acked),
        sealed=message.sealed,
        reason=message.reason,
        latest=message.latest,
        pinned=message.pinned,
        tags=tuple(message.tags),
        base_step=message.base_step if message.base_attempt else None,
        base_attempt=message.base_attempt,
    )


def _check_attempt(current: CheckpointMetadata, expected: CheckpointMetadata) -> None:
    if current.id != expected.id:
        raise CheckpointAborted(f"another attempt took the place of the save of step {expected.step}")
    if current.state not in {CheckpointState.OPEN, CheckpointState.COMMITTED}:
        raise CheckpointAborted(
            f"the save of step {expected.step} is {current.state.value}: {current.reason}"
        )


def _waiting_for(checkpoint: CheckpointMetadata) -> str:
    if checkpoint.missing:
        first = ", ".join(str(rank) for rank in checkpoint.missing[:8])
        return f"{len(checkpoint.missing)} of {checkpoint.ranks} ranks have not acked, among them {first}"
    return "all ranks acked; the commit is due" if checkpoint.sealed else "rank 0 has not sealed it"
