"""`strata checkpoints retention | rewind`: which checkpoints the leader keeps, and from which a job restarts.

Both need a coordinator. Without coordinators, the settings of `CheckpointManager` decide which checkpoints stay, and
a program goes back to a checkpoint by `restore(state, step=…)`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.checkpoints.inspection import SourceOptions, on_catalog
from strata.cli.checkpoints.retention import Yes, user_name
from strata.cli.checkpoints.where import Which, chosen
from strata.cli.console.output import (
    Json,
    print_json,
    print_table,
    print_values,
    printable,
)
from strata.core.spans import seconds
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from strata.v1.retention_pb2 import GetRetentionResponse, Keep

KeepCount = Annotated[
    int | None, typer.Option("--keep-count", min=0, help="Keep this many of the newest; 0: all of them.")
]
EverySteps = Annotated[
    int, typer.Option("--keep-every-steps", min=0, help="Keep the first from each multiple of this on, too.")
]
Best = Annotated[
    int, typer.Option("--keep-best", min=0, help="Keep this many of the best by --best-metric, too.")
]
Metric = Annotated[str, typer.Option("--best-metric", help="A name in their metadata, such as loss.")]
Highest = Annotated[bool, typer.Option("--highest", help="The best have the highest number, not the lowest.")]
AgeS = Annotated[
    float, typer.Option("--keep-age-s", min=0, help="Keep those younger than this many seconds, too.")
]
OnTier = Annotated[
    str, typer.Option("--tier", help="Rules for the copies on this tier alone, such as replica.")
]


@on_catalog
def retention(
    keep_count: KeepCount = None,
    keep_every_steps: EverySteps = 0,
    keep_best: Best = 0,
    best_metric: Metric = "",
    highest: Highest = False,
    keep_age_s: AgeS = 0.0,
    tier: OnTier = "",
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Show which checkpoints of a job are kept and why; with --keep-count, set the rules first.

    A CheckpointManager with its own keep_count sets its rules again whenever the job starts.

    Example: strata checkpoints retention --keep-count 3 --keep-every-steps 1000 --job gpt
    """
    age_s = seconds(keep_age_s, what="--keep-age-s", zero=True)
    if keep_count is None and (keep_every_steps or keep_best or best_metric or highest or age_s or tier):
        raise InvalidArgument(
            "the rules need the number of newest checkpoints to keep",
            hint="add --keep-count; 0 keeps everything",
        )
    with looking.catalog() as source:
        if keep_count is not None:
            from strata.v1.retention_pb2 import Keep  # noqa: PLC0415  # protobuf only when it is needed

            keep = Keep(
                latest=keep_count,
                every_steps=keep_every_steps,
                best=keep_best,
                metric=best_metric,
                highest=highest,
                age_ms=round(1000 * age_s),
            )
            source.keep(keep, tier=tier, who=user_name())
        found = source.rules()
    if as_json:
        print_json(found)
        return
    for line in _rules(found):
        sys.stdout.write(f"{printable(line)}\n")
    names = sorted({*found.kept, *found.going}, key=lambda name: int(name.partition("/")[0]))
    rows = [(*name.split("/", 1), _fate(found, name)) for name in names]
    print_table(f"job {looking.job}", ("STEP", "ATTEMPT", "WHY"), rows, empty="there is no checkpoint")


def _fate(found: GetRetentionResponse, name: str) -> str:
    """Return, as text, which copies retention keeps and deletes: the answer may differ from tier to tier."""
    why = f"stays: {found.kept[name]}" if name in found.kept else ""
    if name in found.going:
        why = f"to be deleted where no rule keeps it; {why}" if why else "to be deleted: no rule keeps it"
    return why


def _rules(found: GetRetentionResponse) -> Iterator[str]:
    if not found.HasField("retention"):
        yield "no rules are set: everything stays"
        return
    yield f"{_sentence(found.retention.keep)} (set by {found.retention.who or 'an unnamed caller'})"
    for name in sorted(found.retention.tiers):
        yield f"on {name}: {_sentence(found.retention.tiers[name])}"


def _sentence(keep: Keep) -> str:
    rules = [
        (keep.latest, f"the {keep.latest} newest"),
        (keep.every_steps, f"the first from each multiple of {keep.every_steps} steps on"),
        (keep.best, f"the {keep.best} best by {'highest' if keep.highest else 'lowest'} {keep.metric}"),
        (keep.age_ms, f"those younger than {keep.age_ms / 3_600_000:g} h"),
    ]
    return "kept: " + (", ".join(rule for number, rule in rules if number) or "everything")


@on_catalog
def rewind(
    which: Which,
    yes: Yes = False,
    as_json: Json = False,
    *,
    looking: SourceOptions,
) -> None:
    """Rewind a job: a new generation begins immediately, from this checkpoint.

    Later checkpoints stay in the catalog, but no longer count as the newest. Asks first, unless --yes.

    Example: strata checkpoints rewind 5000 --job gpt
    """
    with looking.catalog() as source:
        generation = source.generation()
        checkpoint = chosen(source.all(), which, alone=True)
        what = f"step {checkpoint.step} of generation {checkpoint.generation}"
        if not yes:
            typer.confirm(
                f"End generation {generation} of job {looking.job}, and begin from {what}?",
                abort=True,
                err=True,
            )
        source.rewind(checkpoint, generation=generation, who=user_name())
    if as_json:
        print_values({"step": checkpoint.step, "attempt": checkpoint.id, "generation": generation})
        return
    sys.stdout.write(
        f"generation {generation} of job {printable(looking.job)} ends; the next begins from {what}\n"
    )
