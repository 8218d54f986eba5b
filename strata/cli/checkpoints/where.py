"""Sources of checkpoints for the commands, and resolution of an argument to a checkpoint.

A `CheckpointSource` is either a job or a storage root (`--storage`). A job's catalog comes from the coordinators. A
root is listed, without a coordinator. If a root belongs to coordinators, its listing can only be read: changes need
the coordinators.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.storage.sink import Storage
from strata.cli.checkpoints.garbage import Garbage
from strata.cli.checkpoints.root_listing import StorageSource, storage_source
from strata.config import Credentials
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointNotFound, InvalidArgument

if TYPE_CHECKING:
    from strata.cli.checkpoints.cluster import ClusterSource

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


class CheckpointSource(Protocol):
    """The checkpoints of one job, or of one storage root without coordinators."""

    @property
    def title(self) -> str: ...

    def all(self) -> list[CheckpointMetadata]:
        """Return every checkpoint in order, uncommitted ones included."""
        ...

    def place(self, checkpoint: CheckpointMetadata) -> tuple[Storage, str]:
        """Return the storage through which this host reaches the checkpoint, and its folder there."""
        ...

    def reading(self, checkpoint: CheckpointMetadata) -> contextlib.AbstractContextManager[object]:
        """Protect the checkpoint from deletion while the body runs; raise `Refused` if its deletion has begun."""
        ...

    def values(self, checkpoint: CheckpointMetadata) -> dict[str, Any]:
        """Return the checkpoint with the fields of the proto's `Checkpoint`, for `--json`."""
        ...

    def pin(self, checkpoint: CheckpointMetadata, *, who: str, why: str) -> None: ...

    def unpin(self, checkpoint: CheckpointMetadata) -> None: ...

    def tag(self, checkpoint: CheckpointMetadata, name: str, *, who: str) -> None: ...

    def untag(self, name: str) -> None: ...

    def tags(self) -> Collection[str]:
        """Return all tags, unreadable ones included."""
        ...

    def remove(self, checkpoint: CheckpointMetadata) -> None:
        """Forbid the checkpoint's use, remove its objects, then its record; raise `Refused` while it is needed.

        After an interruption at any point the call may be repeated.
        """
        ...

    def garbage(self, keep_count: int | None) -> Iterator[Garbage]:
        """Yield deletable items: failed saves, and checkpoints older than the `keep_count` newest."""
        ...


@contextlib.contextmanager
def opened(
    storage: str | None, *, endpoints: str, job: str, timeout_s: float, credentials: Credentials
) -> Iterator[StorageSource | ClusterSource]:
    """Yield the checkpoints of `storage`; without `storage`, those of `job`."""
    if storage is not None:
        yield storage_source(storage, job)
        return
    with catalog_of(job, endpoints=endpoints, timeout_s=timeout_s, credentials=credentials) as source:
        yield source


@contextlib.contextmanager
def catalog_of(
    job: str, *, endpoints: str, timeout_s: float, credentials: Credentials
) -> Iterator[ClusterSource]:
    """Yield the checkpoints of a job, from the coordinators' catalog."""
    from strata.cli.checkpoints.cluster import ClusterSource  # noqa: PLC0415  # grpc only when needed
    from strata.client import CoordinatorClient  # noqa: PLC0415  # as above

    with CoordinatorClient.connect(
        endpoints, job=job, timeout_s=timeout_s, credentials=credentials
    ) as client:
        yield ClusterSource(client)


def chosen(known: Sequence[CheckpointMetadata], word: str, *, alone: bool = False) -> CheckpointMetadata:
    """Return the checkpoint that `word` names: the newest committed match, else the newest match.

    `alone`: refuse a word that matches several checkpoints, because the action cannot be undone. Raise
    `CheckpointNotFound` if no checkpoint matches.
    """
    found = _named(known, word)
    if not found:
        raise CheckpointNotFound(f"no checkpoint is {word!r}; there are {_names_of(known)}")
    if len(found) > 1 and (alone or not word.isdigit()):
        names = ", ".join(f"{c.step}@{c.generation} ({c.id}, {c.state.value})" for c in found)
        raise InvalidArgument(f"{word!r} matches each of {names}", hint="pass the attempt's id")
    committed = [c for c in found if c.state is CheckpointState.COMMITTED]
    return (committed or found)[-1]


def means_another(word: str) -> bool:
    """Return whether a word already names a checkpoint, for example by its step, and so cannot be a tag."""
    return word == "latest" or word.isdigit()


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


def _names_of(known: Sequence[CheckpointMetadata]) -> str:
    steps = [str(c.step) for c in known]
    few = ", ".join(steps[-8:])
    tags = sorted({tag for c in known for tag in c.tags})
    named = f" and the tags {', '.join(tags[:8])}{', …' if len(tags) > 8 else ''}" if tags else ""
    return f"the steps {'…, ' if len(steps) > 8 else ''}{few}{named}" if steps else "none"
