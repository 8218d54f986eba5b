"""Where a command looks for checkpoints, and which one a word names.

A `Shelf` is what a command needs: that of a job, whose catalog the coordinators keep, or that of a
storage root (`--storage`), which needs no coordinator and answers from what lies there. A root that
belongs to coordinators is only looked at in this way: what changes it goes through them.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from strata.checkpoint import marks, opening, root
from strata.checkpoint.catalog import CheckpointMetadata
from strata.checkpoint.local_catalog import LocalCatalog
from strata.checkpoint.place import parse_place
from strata.checkpoint.sink import Storage
from strata.cli.output import message_as_dict
from strata.config import Credentials
from strata.core.checkpoints import folder_name
from strata.core.records import CheckpointState
from strata.errors import CheckpointError, CheckpointNotFound, InvalidArgument, Refused, StorageError

if TYPE_CHECKING:
    from strata.cli.checkpoints.cluster import ClusterShelf
    from strata.v1.checkpoints_pb2 import Checkpoint

StorageRoot = Annotated[
    str | None,
    typer.Option("--storage", "-s", help="A storage root, as a path or URI: look there, ask no coordinator."),
]
Which = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A step, STEP@GENERATION, a tag, an attempt's id or its beginning, or `latest`.",
    ),
]
MIN_ID_CHARS = 6


class Shelf(Protocol):
    """The checkpoints of one job, or of one storage root without coordinators."""

    @property
    def title(self) -> str: ...

    def all(self) -> list[CheckpointMetadata]:
        """Return every checkpoint in its order, those that are not committed included."""
        ...

    def place(self, checkpoint: CheckpointMetadata) -> tuple[Storage, str]:
        """Return the storage that holds it, as this host reaches it, and its folder there."""
        ...

    def values(self, checkpoint: CheckpointMetadata) -> dict[str, Any]:
        """Return it with the fields of the proto's `Checkpoint`, for `--json`."""
        ...

    def pin(self, checkpoint: CheckpointMetadata, *, who: str, why: str) -> None: ...

    def unpin(self, checkpoint: CheckpointMetadata) -> None: ...

    def tag(self, checkpoint: CheckpointMetadata, name: str) -> None: ...

    def untag(self, name: str) -> None: ...

    def delete(self, checkpoint: CheckpointMetadata) -> None:
        """Forbid its use, so that its objects may be removed; `Refused` while it is needed."""
        ...

    def deleted(self, checkpoint: CheckpointMetadata) -> None:
        """Forget it: its objects are removed."""
        ...


@contextlib.contextmanager
def opened(
    storage: str | None, *, endpoints: str, job: str, timeout_s: float, credentials: Credentials
) -> Iterator[StorageShelf | ClusterShelf]:
    """Yield the shelf of `storage`, or without one that of `job`."""
    if storage is not None:
        yield storage_shelf(storage, job)
        return
    from strata.cli.checkpoints.cluster import ClusterShelf  # noqa: PLC0415  # grpc only when needed
    from strata.client import CoordinatorClient  # noqa: PLC0415  # as above

    with CoordinatorClient.connect(
        endpoints, job=job, timeout_s=timeout_s, credentials=credentials
    ) as client:
        yield ClusterShelf(client)


def open_storage(where: str) -> Storage:
    """Return the storage at a path or URI; `ConfigError` when it is none."""
    return opening.open_storage(parse_place(where), nonce=lambda: uuid.uuid4().hex)


def storage_shelf(where: str, job: str) -> StorageShelf:
    """Return the shelf of a root, of a job's folder in one, or of that of `job` in it."""
    storage = open_storage(where)
    owner = root.owner_of(storage)
    if owner is None:
        raise CheckpointNotFound(
            f"{storage.uri} is no storage root: it has no {root.NAME}",
            hint="check the path; a save makes one",
        )
    if owner == root.COORDINATED:
        held = [name for name in storage.list() if root.owner_of(storage, folder=name) is not None]
        if job not in held:
            raise CheckpointNotFound(
                f"{storage.uri} has nothing of job {job}, only of {', '.join(held) or 'none'}",
                hint="say --job",
            )
        storage = open_storage(f"{storage.uri}/{job}")
    return StorageShelf(storage, standalone=owner == root.STANDALONE)


class StorageShelf:
    """What lies in a root. `standalone`: no coordinator has a say in it."""

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

    def values(self, checkpoint: CheckpointMetadata) -> dict[str, Any]:
        return message_as_dict(_message(checkpoint))

    def pin(self, checkpoint: CheckpointMetadata, *, who: str, why: str) -> None:
        self._check_owner()
        marks.pin(self.storage, checkpoint, who=who, why=why)

    def unpin(self, checkpoint: CheckpointMetadata) -> None:
        self._check_owner()
        marks.unpin(self.storage, checkpoint)

    def tag(self, checkpoint: CheckpointMetadata, name: str) -> None:
        self._check_owner()
        marks.tag(self.storage, checkpoint, name)

    def untag(self, name: str) -> None:
        self._check_owner()
        marks.untag(self.storage, name)

    def delete(self, checkpoint: CheckpointMetadata) -> None:
        self._check_owner()
        self._catalog.delete(checkpoint)

    def deleted(self, checkpoint: CheckpointMetadata) -> None:
        marks.forget(self.storage, checkpoint)
        self._catalog.deleted(checkpoint)

    def leftovers(self) -> list[str]:
        """Return the folders of saves that a process left unfinished, and nobody is at any more."""
        self._check_owner()
        return self._catalog.leftovers()

    def _check_owner(self) -> None:
        if not self._standalone:
            raise Refused(
                f"{self.storage.uri} belongs to coordinators, who must know of a change",
                hint="leave --storage out, and say --endpoints and --job",
            )


def place_of(checkpoint: CheckpointMetadata) -> tuple[Storage, str]:
    """Return the storage and the folder that a record's path names; `StorageError` if not from here.

    Where the root is, and the folder in it is not, its objects are gone: that is no error here.
    """
    folder = folder_name(checkpoint.step, checkpoint.generation, checkpoint.id)
    above = checkpoint.path.removesuffix(f"/{folder}")
    if above == checkpoint.path:
        raise CheckpointError(
            f"step {checkpoint.step} is recorded at {checkpoint.path}, which is no place of it"
        )
    storage = open_storage(above)
    if root.owner_of(storage) is None:
        raise StorageError(
            f"this host has nothing at {above}", hint="run it where that path is mounted, or say --storage"
        )
    return storage, folder


def chosen(known: Sequence[CheckpointMetadata], word: str, *, alone: bool = False) -> CheckpointMetadata:
    """Return the checkpoint that `word` names: of one step's the newest committed, or the newest.

    `alone`: what is asked for is not undone, so a word that several answer to is refused.
    `CheckpointNotFound` when it names none.
    """
    found = _named(known, word)
    if not found:
        raise CheckpointNotFound(f"no checkpoint is {word!r}; there are {_told(known)}")
    if len(found) > 1 and (alone or not word.isdigit()):
        names = ", ".join(f"{c.step}@{c.generation} ({c.id}, {c.state.value})" for c in found)
        raise InvalidArgument(f"{word!r} may be each of {names}", hint="say the attempt's id")
    committed = [c for c in found if c.state is CheckpointState.COMMITTED]
    return (committed or found)[-1]


def _named(known: Sequence[CheckpointMetadata], word: str) -> list[CheckpointMetadata]:
    if word == "latest":
        return [c for c in known if c.latest]
    if word.isdigit():
        return [c for c in known if c.step == int(word)]
    if (slot := re.fullmatch(r"(\d+)@(\d+)", word)) is not None:
        return [c for c in known if (c.step, c.generation) == (int(slot[1]), int(slot[2]))]
    whole = [c for c in known if c.id == word or word in c.tags]
    if whole or len(word) < MIN_ID_CHARS:
        return whole
    return [c for c in known if c.id.startswith(word)]


def _told(known: Sequence[CheckpointMetadata]) -> str:
    steps = [str(c.step) for c in known]
    few = ", ".join(steps[-8:])
    return f"the steps {'…, ' if len(steps) > 8 else ''}{few}" if steps else "none"


def whoever() -> str:
    """Return the name of the person at the terminal, as far as the environment knows it."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid {os.getuid()}"


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
