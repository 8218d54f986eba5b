"""A catalog of several ranks in one process: the protocol without coordinators."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from strata.checkpoint.catalog import CheckpointAck, CheckpointMetadata, CheckpointSeal, SaveRequest
from strata.core.checkpoints import folder_name
from strata.core.records import CheckpointState
from strata.errors import CheckpointAborted, Conflict, Unavailable


class SharedCatalog:
    """The records; `of(rank)` is what one rank sees."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.records: dict[int, CheckpointMetadata] = {}
        self.changed = threading.Condition()
        self.attempts = 0
        self.digests: dict[tuple[str, int], str] = {}

    def of(self, rank: int) -> RankCatalog:
        return RankCatalog(self, rank)

    def change(self, step: int, **changes: object) -> CheckpointMetadata:
        with self.changed:
            record = dataclasses.replace(self.records[step], **changes)  # type: ignore[arg-type]  # named fields
            self.records[step] = record
            self.changed.notify_all()
            return record


class RankCatalog:
    """A `Catalog` for one rank."""

    by_marker = False

    def __init__(self, shared: SharedCatalog, rank: int) -> None:
        self._shared = shared
        self.rank = rank

    @property
    def world_size(self) -> int:
        return self._shared.world_size

    def folder(self, checkpoint: CheckpointMetadata) -> str:
        return f"job/{folder_name(checkpoint.step, checkpoint.generation, checkpoint.id)}"

    def begin(self, request: SaveRequest) -> CheckpointMetadata:
        shared = self._shared
        with shared.changed:
            held = shared.records.get(request.step)
            if held is None or (held.state is CheckpointState.ABORTED and held.id == request.replaces):
                shared.attempts += 1
                held = shared.records[request.step] = CheckpointMetadata(
                    id=f"a{shared.attempts}",
                    step=request.step,
                    generation=1,
                    path="memory:///",
                    state=CheckpointState.OPEN,
                    ranks=shared.world_size,
                    checkpoint_type=request.type,
                    base_step=request.base_step,
                    base_attempt=request.base_attempt,
                )
            return held

    def ack(self, checkpoint: CheckpointMetadata, ack: CheckpointAck) -> CheckpointMetadata:
        with self._shared.changed:
            held = self._shared.records[checkpoint.step]
            if held.state is not CheckpointState.OPEN:
                raise CheckpointAborted(held.reason)
            self._shared.digests[checkpoint.id, self.rank] = ack.digest
            return self._shared.change(checkpoint.step, acked=held.acked | {self.rank})

    def seal(self, checkpoint: CheckpointMetadata, seal: CheckpointSeal) -> CheckpointMetadata:
        for rank, digest in enumerate(seal.part_digests):
            if self._shared.digests[checkpoint.id, rank] != digest:
                raise Conflict(f"rank {rank} acked another part")
        return self._shared.change(
            checkpoint.step,
            state=CheckpointState.COMMITTED,
            manifest_digest=seal.manifest_digest,
            size_bytes=seal.size_bytes,
        )

    def abort(self, checkpoint: CheckpointMetadata, reason: str) -> CheckpointMetadata:
        with self._shared.changed:
            held = self._shared.records[checkpoint.step]
            if held.state is not CheckpointState.OPEN:
                return held
            return self._shared.change(checkpoint.step, state=CheckpointState.ABORTED, reason=reason)

    def wait(
        self,
        checkpoint: CheckpointMetadata,
        until: Callable[[CheckpointMetadata], bool],
        *,
        timeout_s: float,
        cancelled: threading.Event,
    ) -> CheckpointMetadata:
        def over() -> bool:
            held = self._shared.records[checkpoint.step]
            return until(held) or held.state is CheckpointState.ABORTED

        with self._shared.changed:
            if not self._shared.changed.wait_for(over, timeout_s):
                raise Unavailable("the others do not come")
            held = self._shared.records[checkpoint.step]
        if held.state is CheckpointState.ABORTED:
            raise CheckpointAborted(f"given up: {held.reason}")
        return held

    def all(self) -> list[CheckpointMetadata]:
        return sorted(self._shared.records.values(), key=lambda c: c.order)

    def latest(self) -> CheckpointMetadata | None:
        committed = [c for c in self.all() if c.state is CheckpointState.COMMITTED]
        return committed[-1] if committed else None

    def restore_point(self) -> CheckpointMetadata | None:
        return self.latest()

    def delete(self, checkpoint: CheckpointMetadata) -> None:
        self._shared.change(checkpoint.step, state=CheckpointState.DELETING)

    def deleted(self, checkpoint: CheckpointMetadata) -> None:
        self._shared.records.pop(checkpoint.step, None)
