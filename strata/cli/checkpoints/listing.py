"""`strata checkpoints list | show`: all checkpoints, and one in full."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.format.manifest import Manifest, RankManifest
from strata.checkpoint.format.marker import read_manifest, read_rank_manifests
from strata.checkpoint.restore.diff import plain_values
from strata.cli.checkpoints.inspection import SourceOptions, on_source
from strata.cli.checkpoints.where import CheckpointSource, Which, chosen
from strata.cli.console.output import (
    Json,
    print_table,
    print_values,
    size,
)
from strata.core.kv.records import CheckpointState
from strata.errors import Refused

Tensors = Annotated[bool, typer.Option("--tensors", help="List every tensor, too.")]
Rank = Annotated[int, typer.Option("--rank", min=0, help="The rank whose tensors and values to show.")]


@on_source
def list_checkpoints(
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Show the checkpoints of a job or of a storage root, newest last.

    Example: strata checkpoints list --job gpt --json
    """
    with looking.source() as source:
        known = source.all()
        title = source.title
        values = [source.values(c) for c in known] if as_json else []
    if as_json:
        print_values(values)
        return
    print_table(
        title,
        ("STEP", "GENERATION", "TYPE", "STATE", "ACKS", "SIZE", "SAVED AT", "PATH"),
        (
            (
                _step_label(c),
                c.generation,
                c.checkpoint_type.value,
                c.state.value,
                f"{len(c.acked)} of {c.ranks}{', sealed' if c.sealed else ''}",
                size(c.size_bytes),
                saved_at(c),
                c.path,
            )
            for c in known
        ),
        empty=f"{title} has no checkpoint yet",
    )


def _step_label(c: CheckpointMetadata) -> str:
    words = [word for word, true in (("latest", c.latest), ("pinned", c.pinned)) if true] + list(c.tags)
    return f"{c.step} ({', '.join(words)})" if words else str(c.step)


def saved_at(c: CheckpointMetadata) -> str:
    """Return a checkpoint's creation time as text, in UTC."""
    if not c.created_unix_ms:
        return "-"
    return datetime.fromtimestamp(c.created_unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


@on_source
def show(
    which: Which = "latest",
    tensors: Tensors = False,
    rank: Rank = 0,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Show one checkpoint: its state, its contents, and the checkpoint before it.

    Example: strata checkpoints show latest --tensors --storage /data/checkpoints
    """
    with looking.source() as source:
        checkpoint = chosen(source.all(), which)
        manifest, parts = manifests_of(source, checkpoint) if _is_whole(checkpoint) else (None, [])
    if parts and rank >= len(parts):
        raise Refused(f"step {checkpoint.step} has no rank {rank}, only 0 to {len(parts) - 1}")
    part = parts[rank] if parts else None
    if as_json:
        print_values(
            {**source.values(checkpoint), **(_contents(manifest, part) if manifest and part else {})}
        )
        return
    print_table(
        f"step {checkpoint.step} of {source.title}: {checkpoint.state.value}",
        ("FIELD", "VALUE"),
        _rows(checkpoint, manifest, part),
        empty="",
    )
    if part is None:
        return
    values = list(plain_values(part.tree))
    print_table(
        f"values of rank {rank}", ("PATH", "VALUE"), ((p, v[:200]) for p, v in values), empty="no values"
    )
    if tensors:
        print_table(
            f"tensors of rank {rank}",
            ("NAME", "DTYPE", "SHAPE", "SIZE"),
            (
                (name, e.spec.dtype, list(e.spec.shape), size(e.spec.size_bytes))
                for name, e in part.tensors.items()
            ),
            empty="no tensors",
        )


def _is_whole(checkpoint: CheckpointMetadata) -> bool:
    return checkpoint.state is CheckpointState.COMMITTED


def manifests_of(
    source: CheckpointSource, checkpoint: CheckpointMetadata
) -> tuple[Manifest, list[RankManifest]]:
    """Return the verified manifests of a committed checkpoint; `Refused` if it is not committed."""
    if not _is_whole(checkpoint):
        why = f": {checkpoint.reason}" if checkpoint.reason else ""
        raise Refused(f"step {checkpoint.step} is {checkpoint.state.value}, not committed{why}")
    storage, folder = source.place(checkpoint)
    manifest = read_manifest(storage, folder, checkpoint.manifest_digest)
    return manifest, read_rank_manifests(storage, folder, manifest)


def _rows(
    c: CheckpointMetadata, manifest: Manifest | None, part: RankManifest | None
) -> Sequence[tuple[str, object]]:
    before = manifest.predecessor if manifest is not None else None
    return [
        ("attempt", c.id),
        ("generation", c.generation),
        ("epoch", c.epoch),
        ("type", c.checkpoint_type.value),
        *([("why", c.reason)] if c.reason else []),
        ("is", ", ".join(w for w, true in (("latest", c.latest), ("pinned", c.pinned)) if true) or "-"),
        ("tags", ", ".join(c.tags) or "-"),
        ("ranks", c.ranks),
        ("size", size(c.size_bytes)),
        ("saved at", saved_at(c)),
        ("path", c.path),
        ("model hash", c.model_hash or "-"),
        ("manifest", c.manifest_digest or "-"),
        ("follows", f"step {before[0]}, generation {before[1]}" if before else "nothing"),
        *((f"metadata {name}", value) for name, value in sorted((c.metadata or {}).items())),
        *([("tensors", f"{len(part.tensors)} of rank {part.rank}")] if part is not None else []),
    ]


def _contents(manifest: Manifest, part: RankManifest) -> dict[str, Any]:
    return {
        "predecessor": list(manifest.predecessor) if manifest.predecessor else None,
        "rank": part.rank,
        "values": dict(plain_values(part.tree)),
        "tensors": {
            name: {
                "kind": e.spec.kind,
                "dtype": e.spec.dtype,
                "shape": list(e.spec.shape),
                "size_bytes": e.spec.size_bytes,
            }
            for name, e in part.tensors.items()
        },
    }
