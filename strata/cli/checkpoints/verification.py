"""`strata checkpoints verify | diff`: verification of every byte, and comparison of two checkpoints."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated, Any

import typer

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.restore.diff import Difference, compare
from strata.checkpoint.restore.verify import Verification, verify
from strata.cli.checkpoints.inspection import SourceOptions, on_source
from strata.cli.checkpoints.listing import manifests_of
from strata.cli.checkpoints.where import CheckpointSource, Which, chosen
from strata.cli.console.exits import Exit
from strata.cli.console.output import (
    Json,
    print_table,
    print_values,
    printable,
    size,
)
from strata.cli.console.progress import byte_progress
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointNotFound, Refused

All = Annotated[
    bool, typer.Option("--all", help="Every committed one, and those that storage marks as corrupt.")
]
Newer = Annotated[str, typer.Argument(metavar="NEWER", help="The other one, named likewise.")]
_READABLE = frozenset({CheckpointState.COMMITTED, CheckpointState.CORRUPT})


@on_source
def verify_checkpoints(
    which: Which = "latest",
    every: All = False,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Read a checkpoint and say whether every byte is still as it was saved. Changes nothing.

    If not, the exit status is 1, and the output names every file and tensor that differs.

    Example: strata checkpoints verify latest --storage /data/checkpoints
    """
    with looking.source() as source:
        known = source.all()
        selected = [c for c in known if c.state in _READABLE] if every else [chosen(known, which)]
        if not selected:
            raise CheckpointNotFound(f"{source.title} has no checkpoint to verify")
        found = [(c, _verified(source, c)) for c in selected]
    if as_json:
        print_values([_as_values(c, v) for c, v in found])
    else:
        for c, verification in found:
            _print(c, verification)
    if not all(verification.good for _, verification in found):
        raise typer.Exit(Exit.FAILURE)


def _verified(source: CheckpointSource, checkpoint: CheckpointMetadata) -> Verification:
    if checkpoint.state not in _READABLE:
        raise Refused(f"step {checkpoint.step} is {checkpoint.state.value}: there is nothing to verify yet")
    storage, folder = source.place(checkpoint)
    with (
        source.reading(checkpoint),
        byte_progress(f"step {checkpoint.step}", checkpoint.size_bytes) as advance,
    ):
        return verify(storage, folder, manifest_digest=checkpoint.manifest_digest or None, on_bytes=advance)


def _as_values(checkpoint: CheckpointMetadata, verification: Verification) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "generation": checkpoint.generation,
        "attempt": checkpoint.id,
        "good": verification.good,
        "read_bytes": verification.read_bytes,
        "marked": verification.marked,
        "problems": list(verification.problems),
    }


def _print(checkpoint: CheckpointMetadata, verification: Verification) -> None:
    what = f"step {checkpoint.step}, generation {checkpoint.generation}"
    if verification.good:
        unmarked = "" if verification.marked else "; its marker is not written yet"
        sys.stdout.write(f"{what}: good, {size(verification.read_bytes)} read{unmarked}\n")
        return
    sys.stdout.write(f"{what}: CORRUPT\n")
    for problem in verification.problems:
        sys.stdout.write(f"  {printable(problem)}\n")


@on_source
def diff(
    older: Which,
    newer: Newer = "latest",
    rank: Annotated[int, typer.Option("--rank", min=0, help="The rank whose part to compare.")] = 0,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Show how another checkpoint differs: tensors and values. Reads manifests only.

    Example: strata checkpoints diff 1000 2000 --job gpt
    """
    with looking.source() as source:
        known = source.all()
        before, after = chosen(known, older), chosen(known, newer)
        parts = [manifests_of(source, checkpoint)[1] for checkpoint in (before, after)]
    for checkpoint, ranks in zip((before, after), parts, strict=True):
        if rank >= len(ranks):
            raise Refused(f"step {checkpoint.step} has no rank {rank}, only 0 to {len(ranks) - 1}")
    difference = compare(parts[0][rank], parts[1][rank])
    if as_json:
        print_values(dataclasses.asdict(difference))
        return
    _print_difference(f"step {before.step} to step {after.step}, rank {rank}", difference)


def _print_difference(title: str, difference: Difference) -> None:
    rows: list[tuple[object, ...]] = [("-", name, "removed", "") for name in difference.removed]
    rows += [("+", name, "added", "") for name in difference.added]
    for c in difference.changed:
        if c.chunks is None:
            rows.append(("!", c.name, f"{c.before} became {c.after}", ""))
        else:
            rows.append(("~", c.name, f"{c.chunks} of {c.of_chunks} chunks", size(c.changed_bytes)))
    rows += [("~", v.path, f"{_value(v.before)} became {_value(v.after)}", "") for v in difference.values]
    print_table(title, ("", "NAME", "CHANGE", "SIZE"), rows, empty=f"{title}: nothing is different")
    sys.stdout.write(
        f"{difference.same} tensors are the same; at most {size(difference.changed_bytes)} of"
        f" {size(difference.total_bytes)} are different\n"
    )


def _value(text: str | None) -> str:
    return "nothing" if text is None else text[:80]
