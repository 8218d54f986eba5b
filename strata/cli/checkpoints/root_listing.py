"""Checkpoints of a storage root, found by listing its objects, without coordinators."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from strata.checkpoint.catalog import marks
from strata.checkpoint.catalog.evidence import Folder
from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.storage import opening, root
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.place import parse_place
from strata.checkpoint.storage.removal import remove_objects
from strata.checkpoint.storage.sink import Storage
from strata.cli.checkpoints.garbage import Garbage
from strata.cli.console.output import message_as_dict
from strata.client.checkpoints.retention import excess
from strata.core.checkpoints.references import Keep
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointNotFound, Refused

if TYPE_CHECKING:
    from strata.v1.checkpoints_pb2 import Checkpoint


def open_storage(where: str) -> Storage:
    """Return the storage at a path or URI; `ConfigError` if it is neither."""
    return opening.open_storage(parse_place(where), nonce=lambda: uuid.uuid4().hex)


def storage_source(where: str, job: str) -> StorageSource:
    """Return the checkpoints at `where`: a root without jobs, a job's folder, or a root with a folder for `job`."""
    storage = open_storage(where)
    owner = root.owner_of(storage)
    if owner is None:
        raise _no_root(storage)
    if owner == root.COORDINATED:
        held = [name for name in storage.list() if root.owner_of(storage, folder=name) is not None]
        if job not in held:
            raise CheckpointNotFound(
                f"{storage.uri} has nothing of job {job}, only of {', '.join(held) or 'none'}",
                hint="pass --job",
            )
        storage = open_storage(f"{storage.uri}/{job}")
    return StorageSource(storage, standalone=owner == root.STANDALONE)


def _no_root(storage: Storage) -> CheckpointNotFound:
    why, hint = f"it has no {root.NAME}", "check the path; a save makes one"
    if Folder.parse(storage.uri.rpartition("/")[2]) is not None:
        hint = "that is one checkpoint's folder; the root is the one above"
    elif isinstance(storage, LocalStorage) and not storage.root.exists():
        why = "it does not exist"
    elif isinstance(storage, LocalStorage) and not storage.root.is_dir():
        why, hint = "it is a file", "pass the folder that checkpoints are saved into"
    return CheckpointNotFound(f"{storage.uri} is no storage root: {why}", hint=hint)


class StorageSource:
    """The checkpoints of a root. `standalone`: no coordinators use the root."""

    def __init__(self, storage: Storage, *, standalone: bool) -> None:
        self.storage = storage
        self._standalone = standalone
        self._catalog = LocalCatalog(
            storage, new_id=lambda: uuid.uuid4().hex, now_unix_ms=lambda: time.time_ns() // 1_000_000
        )

    @property
    def title(self) -> str:
        return self.storage.uri

    def all(self) -> list[CheckpointMetadata]:
        return self._catalog.all()

    def place(self, checkpoint: CheckpointMetadata) -> tuple[Storage, str]:
        return self.storage, self._catalog.folder(checkpoint)

    def reading(self, checkpoint: CheckpointMetadata) -> contextlib.AbstractContextManager[object]:
        del checkpoint  # without coordinators a deletion does not check for readers
        return contextlib.nullcontext()

    def values(self, checkpoint: CheckpointMetadata) -> dict[str, Any]:
        return message_as_dict(_message(checkpoint))

    def pin(self, checkpoint: CheckpointMetadata, *, who: str, why: str) -> None:
        self._check_owner()
        marks.pin(self.storage, checkpoint, who=who, why=why)

    def unpin(self, checkpoint: CheckpointMetadata) -> None:
        self._check_owner()
        marks.unpin(self.storage, checkpoint)

    def tag(self, checkpoint: CheckpointMetadata, name: str, *, who: str) -> None:
        self._check_owner()
        marks.tag(self.storage, checkpoint, name)

    def untag(self, name: str) -> None:
        self._check_owner()
        marks.untag(self.storage, name)

    def tags(self) -> Collection[str]:
        known = marks.tags(self.storage)
        return {*(name for names in known.of.values() for name in names), *known.broken}

    def remove(self, checkpoint: CheckpointMetadata) -> None:
        self._check_owner()
        self._catalog.delete(checkpoint)
        remove_objects(self.storage, self._catalog.folder(checkpoint))
        marks.forget(self.storage, checkpoint)
        self._catalog.deleted(checkpoint)

    def garbage(self, keep_count: int | None) -> Iterator[Garbage]:
        self._check_owner()
        for folder in self._catalog.leftovers():
            yield Garbage(
                what=folder, why="its save never ended", remove=partial(remove_objects, self.storage, folder)
            )
        # newest first: an incremental checkpoint is deleted before the checkpoints whose chunks it uses
        for c in reversed(excess(self._catalog.all(), Keep(latest=keep_count or 0), now_unix_ms=0)):
            yield Garbage(
                what=f"step {c.step}, generation {c.generation}, attempt {c.id}",
                why="older than those to keep" if c.state is CheckpointState.COMMITTED else c.reason,
                remove=partial(self.remove, c),
            )

    def _check_owner(self) -> None:
        if not self._standalone:
            raise Refused(
                f"{self.storage.uri} belongs to coordinators, which must make each change",
                hint="pass --endpoints and --job instead of --storage",
            )


def _message(c: CheckpointMetadata) -> Checkpoint:
    from strata.v1.checkpoints_pb2 import Checkpoint  # noqa: PLC0415  # protobuf only when needed
    from strata.wire.enums import CHECKPOINT_STATES, CHECKPOINT_TYPES  # noqa: PLC0415  # as above

    return Checkpoint(
        attempt=c.id,
        step=c.step,
        generation=c.generation,
        type=CHECKPOINT_TYPES[c.checkpoint_type],
        state=CHECKPOINT_STATES[c.state],
        ranks=c.ranks,
        acked=sorted(c.acked),
        sealed=c.sealed,
        path=c.path,
        epoch=c.epoch,
        size_bytes=c.size_bytes,
        model_hash=c.model_hash,
        manifest_digest=c.manifest_digest,
        created_unix_ms=c.created_unix_ms,
        metadata=c.metadata,
        reason=c.reason,
        latest=c.latest,
        pinned=c.pinned,
        tags=c.tags,
    )
