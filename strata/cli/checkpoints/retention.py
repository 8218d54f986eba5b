"""`strata checkpoints pin | unpin | tag | untag | delete | gc`: retention of single checkpoints, and deletion."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.cli.checkpoints.inspection import SourceOptions, on_source
from strata.cli.checkpoints.where import Which, chosen, means_another
from strata.cli.console.output import (
    Json,
    print_values,
    printable,
    size,
)
from strata.cli.console.progress import item_progress
from strata.errors import CheckpointNotFound, InvalidArgument, Refused, StorageError

Name = Annotated[str, typer.Argument(help="The name: letters, digits, dots, dashes, underscores.")]
Why = Annotated[
    str, typer.Option("--why", help="The reason to keep it, shown to a caller that pins it for another one.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
KeepCount = Annotated[
    int | None,
    typer.Option(
        "--keep-count", min=1, help="Delete those older than this many of the newest, too. Without it, none."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Print what would be removed, and change nothing.")
]


@on_source
def pin(
    which: Which,
    why: Why = "",
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Keep a checkpoint until it is unpinned, whatever the retention rules.

    Example: strata checkpoints pin 5000 --why "the paper's" --job gpt
    """
    with looking.source() as source:
        checkpoint = chosen(source.all(), which)
        source.pin(checkpoint, who=user_name(), why=why)
    _changed(as_json, checkpoint, f"step {checkpoint.step} is pinned", pinned=True)


@on_source
def unpin(
    which: Which,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Unpin a checkpoint, so that retention may delete it.

    Example: strata checkpoints unpin 5000 --job gpt
    """
    with looking.source() as source:
        checkpoint = chosen(source.all(), which)
        source.unpin(checkpoint)
    _changed(as_json, checkpoint, f"step {checkpoint.step} is not pinned", pinned=False)


@on_source
def tag(
    which: Which,
    name: Name,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Give a checkpoint a name, or move the name to it. A tagged checkpoint is not deleted.

    Example: strata checkpoints tag 5000 best --job gpt
    """
    if means_another(name):
        raise InvalidArgument(
            f"{name!r} cannot be a tag: as a checkpoint's name it means another one",
            hint="a tag is not `latest`, and not of digits alone, which are a step",
        )
    with looking.source() as source:
        checkpoint = chosen(source.all(), which)
        source.tag(checkpoint, name, who=user_name())
    _changed(as_json, checkpoint, f"step {checkpoint.step} is {name}", tag=name)


@on_source
def untag(
    name: Name,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Remove a tag. Retention may delete the checkpoint from then on.

    Example: strata checkpoints untag best --job gpt
    """
    with looking.source() as source:
        if name not in source.tags():
            raise CheckpointNotFound(f"no checkpoint has the name {name!r}")
        source.untag(name)
    if as_json:
        print_values({"tag": name, "removed": True})
        return
    _say(f"no checkpoint is {name} any more")


@on_source
def delete(
    which: Which,
    yes: Yes = False,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Delete a checkpoint and its files. It refuses to delete the latest, a pinned or a used checkpoint.

    Asks first, unless --yes.

    Example: strata checkpoints delete 5000 --job gpt
    """
    with looking.source() as source:
        checkpoint = chosen(source.all(), which, alone=True)
        what = f"step {checkpoint.step}, generation {checkpoint.generation}, {size(checkpoint.size_bytes)}"
        if not yes:
            typer.confirm(f"Delete {what} at {printable(checkpoint.path)}?", abort=True, err=True)
        source.remove(checkpoint)
    _changed(as_json, checkpoint, f"deleted: {what}", deleted=True, size_bytes=checkpoint.size_bytes)


@on_source
def collect(
    keep_count: KeepCount = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Remove files that crashes and interrupted deletions left; with --keep-count, also old checkpoints.

    Saves in progress stay, and so do the latest, pinned, tagged and used checkpoints.

    Example: strata checkpoints gc --dry-run --storage /data/checkpoints
    """
    removed: list[dict[str, Any]] = []
    failure: StorageError | None = None
    with looking.source() as source, item_progress("removable checkpoints") as advance:
        for each in source.garbage(keep_count):
            advance()
            try:
                if not dry_run:
                    each.remove()
            except Refused as error:
                sys.stderr.write(f"{printable(each.what)} stays: {printable(error.message)}\n")
                continue
            except StorageError as error:  # continue with the others
                sys.stderr.write(f"{printable(each.what)} cannot be removed: {printable(error.message)}\n")
                failure = failure or error
                continue
            removed.append({"what": each.what, "why": each.why, "removed": not dry_run})
            if not as_json:
                _say(f"{'would remove' if dry_run else 'removed'} {each.what}: {each.why}")
    if as_json:
        print_values(removed)
    elif not removed and failure is None:
        _say("there is nothing to remove")
    if failure is not None:
        raise failure


def user_name() -> str:
    """Return the user's name from the environment, else the uid."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid {os.getuid()}"


def _changed(as_json: bool, checkpoint: CheckpointMetadata, sentence: str, **facts: object) -> None:
    """Print what changed about a checkpoint, as a sentence or as one JSON document."""
    if not as_json:
        _say(sentence)
        return
    which = {"step": checkpoint.step, "generation": checkpoint.generation, "attempt": checkpoint.id}
    print_values({**which, **facts})


def _say(text: str) -> None:
    sys.stdout.write(f"{printable(text)}\n")
