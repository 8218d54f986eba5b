"""`strata checkpoints export | import | fork | repair`: copies to and from other programs' files, and to new roots."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.convert import file_export, file_import
from strata.checkpoint.copies.copying import copy_checkpoint
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.storage import root
from strata.checkpoint.storage.removal import remove_objects
from strata.checkpoint.storage.sink import Storage
from strata.cli.checkpoints.inspection import SourceOptions, on_source
from strata.cli.checkpoints.listing import manifests_of
from strata.cli.checkpoints.root_listing import StorageSource, open_storage, storage_source
from strata.cli.checkpoints.where import Which, chosen
from strata.cli.console.output import (
    Json,
    print_values,
    printable,
    size,
)
from strata.cli.console.progress import byte_progress
from strata.core.kv.records import CheckpointState
from strata.errors import Refused

Out = Annotated[
    Path, typer.Argument(metavar="FILE", help="Its suffix sets the format, unless --format does.")
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors file, or one of torch.save.")]
Only = Annotated[
    str | None,
    typer.Option(
        "--only", help="A key of the state, such as model: only the entries below it, without that key."
    ),
]
Format = Annotated[
    str | None, typer.Option("--format", help="safetensors, numpy, torch, or bytes for opaque ones.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
RankOf = Annotated[
    int | None, typer.Option("--rank", min=0, help="The rank whose part to write, if the ranks differ.")
]
Step = Annotated[int, typer.Option("--step", min=0, help="The checkpoint's step.")]
Epoch = Annotated[int, typer.Option("--epoch", min=0, help="The checkpoint's epoch.")]
Key = Annotated[
    str | None, typer.Option("--key", help="The key of the state to put it under.", show_default="model")
]
Raw = Annotated[bool, typer.Option("--raw", help="Whatever the file is, import its bytes as they are.")]
Root = Annotated[
    str, typer.Option("--storage", "-s", help="The storage root to save into, as a path or URI.")
]
To = Annotated[
    str, typer.Option("--to", help="The new job; with --storage the new storage root, as a path or URI.")
]

Replica = Annotated[
    str, typer.Option("--replica", help="The storage root with the other copy, as a path or URI.")
]
RepairedTo = Annotated[
    str, typer.Option("--to", help="The new storage root for the whole one, as a path or URI.")
]


@on_source
def export_checkpoint(
    which: Which,
    out: Out,
    only: Only = None,
    rank: RankOf = None,
    file_format: Format = None,
    force: Force = False,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Write a checkpoint's tensors to one file: safetensors, NumPy's .npz or torch's .pt.

    Every byte is verified; the file appears whole or not at all.

    Example: strata checkpoints export latest model.safetensors --only model --job gpt
    """
    with looking.source() as source:
        checkpoint = chosen(source.all(), which)
        _, manifests = manifests_of(source, checkpoint)
        part = file_export.choose(manifests, rank=rank, only=only)
        opaque = isinstance(part.tree, dict) and "b" in part.tree
        named = file_format or ("bytes" if opaque and out.suffix not in file_export.FORMATS else None)
        place, folder = source.place(checkpoint)
        with source.reading(checkpoint), byte_progress(f"step {checkpoint.step}", part.size_bytes) as advance:
            size_bytes = file_export.export(
                place,
                folder,
                part,
                out,
                file_format=file_export.format_of(out, named),
                replace=force,
                on_bytes=advance,
            )
    if as_json:
        print_values({"file": str(out), "size_bytes": size_bytes, "tensors": list(part.tensors)})
        return
    _say(f"{out}: {len(part.tensors)} tensors of step {checkpoint.step}, {size(size_bytes)}")


def import_file(
    path: File,
    storage: Root,
    step: Step = 0,
    epoch: Epoch = 0,
    key: Key = None,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Save the tensors of another program's file as a checkpoint. No code in the file is executed.

    Run by `strata run --job NAME --`, this command makes a checkpoint of that job.

    Example: strata checkpoints import model.safetensors --step 0 --storage /data/checkpoints
    """
    from strata.client.checkpoints.manager import CheckpointManager  # noqa: PLC0415  # only when it is needed

    imported = None if raw else file_import.read_file(path, key=key)
    total = path.stat().st_size if imported is None else imported.size_bytes
    notes = {"imported_from": path.name}
    done = 0
    with byte_progress(path.name, total) as advance, CheckpointManager(storage, capture_rng=False) as manager:

        def on_progress(info: CheckpointInfo) -> None:
            nonlocal done
            advance(info.bytes_written - done)
            done = info.bytes_written

        if imported is None:
            info = manager.save(path.read_bytes(), step, epoch, metadata=notes, progress=on_progress)
        else:
            info = manager.save_state(imported.state, step, epoch, metadata=notes, progress=on_progress)
        info.wait()
    if as_json:
        names = [] if imported is None else list(imported.tensors)
        print_values({"step": step, "attempt": info.id, "path": info.path, "tensors": names})
        return
    what = "opaque bytes" if imported is None else f"{len(imported.tensors)} tensors"
    _say(f"step {step}: {what}, {size(info.size_bytes)}, at {info.path}")


@on_source
def fork(
    which: Which,
    to: To,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Let another training begin from a checkpoint: a new job, or with --storage a new root.

    Example: strata checkpoints fork 5000 --to gpt-cooler --job gpt
    """
    with looking.source() as source:
        checkpoint = chosen(source.all(), which)
        if isinstance(source, StorageSource):
            where = _fork_root(source, checkpoint, to)
        else:
            where = source.fork(checkpoint, to)
    if as_json:
        print_values({"step": checkpoint.step, "attempt": checkpoint.id, "path": where})
        return
    _say(f"a training with {to} begins at step {checkpoint.step}")


def _fork_root(source: StorageSource, checkpoint: CheckpointMetadata, to: str) -> str:
    place, folder = source.place(checkpoint)
    target = _empty_root(to, folder=folder)
    with byte_progress(f"step {checkpoint.step}", checkpoint.size_bytes) as advance:
        copy_checkpoint([place], target, folder, checkpoint.manifest_digest, on_bytes=advance)
    return f"{target.uri}/{folder}"


@on_source
def repair(
    which: Which,
    replica: Replica,
    to: RepairedTo,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Make a whole checkpoint from two damaged copies of it, in a new storage root.

    Each file and each chunk is taken from a copy in which it is intact, and the result is verified. Neither
    copy is changed.

    Example: strata checkpoints repair 5000 --storage /data/checkpoints --replica s3://bucket/ckpt --to /data/repaired
    """
    with looking.source() as source:
        checkpoint = chosen(source.all(), which)
        place, folder = source.place(checkpoint)
        copy = storage_source(
            replica, place.uri.rpartition("/")[2]
        ).storage  # a fork's objects are in the folder of its source's job
        target = _empty_root(to, folder=folder)
        with (
            source.reading(checkpoint) if checkpoint.state is CheckpointState.COMMITTED else nullcontext(),
            byte_progress(f"step {checkpoint.step}", checkpoint.size_bytes) as advance,
        ):
            copy_checkpoint([place, copy], target, folder, checkpoint.manifest_digest, on_bytes=advance)
    where = f"{target.uri}/{folder}"
    if as_json:
        print_values({"step": checkpoint.step, "attempt": checkpoint.id, "path": where})
        return
    _say(f"step {checkpoint.step} is whole in {where}")


def _empty_root(to: str, *, folder: str) -> Storage:
    """Return the storage at `to`, which must hold no checkpoint; remove an interrupted copy of `folder` from it."""
    storage = open_storage(to)
    root.claim(storage, root.STANDALONE)
    known = storage_source(to, "").all()
    if known:
        raise Refused(
            f"{storage.uri} has checkpoints already, of step {known[-1].step} for one",
            hint="a fork begins a root of its own: choose a new one",
        )
    if storage.exists(folder):
        remove_objects(storage, folder)
    return storage


def _say(text: str) -> None:
    sys.stdout.write(f"{printable(text)}\n")
