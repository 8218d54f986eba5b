"""Where a command looks for checkpoints, and which one a word names.

A `CheckpointSource` is what a command needs: that of a job, whose catalog the coordinators keep, or that of a
storage root (`--storage`), which needs no coordinator and answers from what lies there. A root that
belongs to coordinators is only looked at in this way: what changes it goes through them.
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
        """Return every checkpoint in its order, those that are not committed included."""
        ...

    def place(self, checkpoint: CheckpointMetadata) -> tuple[Storage, str]:
        """Return the storage that holds it, as this host reaches it, and its folder there."""
        ...

    def reading(self, checkpoint: CheckpointMetadata) -> contextlib.AbstractContextManager[object]:
        """Keep its bytes from being deleted while the body runs; `Refused` when they are to go already."""
        ...

    def values(self, checkpoint: CheckpointMetadata) -> dict[str, Any]:
        """Return it with the fields of the proto's `Checkpoint`, for `--json`."""
        ...

    def pin(self, checkpoint: CheckpointMetadata, *, who: str, why: str) -> None: ...

    def unpin(self, checkpoint: CheckpointMetadata) -> None: ...

    def tag(self, checkpoint: CheckpointMetadata, name: str, *, who: str) -> None: ...

    def untag(self, name: str) -> None: ...

    def tags(self) -> Collection[str]:
        """Return the names that there are, of checkpoints or broken."""
        ...

    def remove(self, checkpoint: CheckpointMetadata) -> None:
        """Forbid its use, remove its objects, forget it; `Refused` while it is needed.

        What was interrupted anywhere may be repeated.
        """
        ...

    def garbage(self, keep_count: int | None) -> Iterator[Garbage]:
        """Yield what may go: what ended badly, and what is older than so many of the newest."""
        ...


@contextlib.contextmanager
def opened(
    storage: str | None, *, endpoints: str, job: str, timeout_s: float, credentials: Credentials
) -> Iterator[StorageSource | ClusterSource]:
    """Yield the shelf of `storage`, or without one that of `job`."""
    if storage is not None:
        yield storage_source(storage, job)
        return
    with catalog_of(job, endpoints=endpoints, timeout_s=timeout_s, credentials=credentials) as source:
        yield source


@contextlib.contextmanager
def catalog_of(
    job: str, *, endpoints: str, timeout_s: float, credentials: Credentials
) -> Iterator[ClusterSource]:
    """Yield the shelf of a job, whose catalog the coordinators keep."""
    from strata.cli.checkpoints.cluster import ClusterSource  # noqa: PLC0415  # grpc only when needed
    from strata.client import CoordinatorClient  # noqa: PLC0415  # as above

    with CoordinatorClient.connect(
        endpoints, job=job, timeout_s=timeout_s, credentials=credentials
    ) as client:
        yield ClusterSource(client)


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


def means_another(word: str) -> bool:
    """Tell whether a word names a checkpoint by itself, whatever its tags are."""
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


def _told(known: Sequence[CheckpointMetadata]) -> str:
    steps = [str(c.step) for c in known]
    few = ", ".join(steps[-8:])
    tags = sorted({tag for c in known for tag in c.tags})
    named = f" and the tags {', '.join(tags[:8])}{', …' if len(tags) > 8 else ''}" if tags else ""
    return f"the steps {'…, ' if len(steps) > 8 else ''}{few}{named}" if steps else "none"
