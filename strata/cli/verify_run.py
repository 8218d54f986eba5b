"""`strata verify-run`: whether two trainings are equal to the last bit, by the checkpoints that both have."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.restore.assembling import Assembler
from strata.checkpoint.restore.element_diff import ElementDifference, element_difference
from strata.checkpoint.restore.verify import OnBytes
from strata.checkpoint.restore.whole_diff import Pair, Value, WholeTensor
from strata.checkpoint.storage.sink import Storage
from strata.cli.checkpoints.listing import manifests_of
from strata.cli.checkpoints.root_listing import StorageSource, storage_source
from strata.cli.console.exits import Exit
from strata.cli.console.interrupts import INTERRUPTED
from strata.cli.console.output import Job, Json, print_table, print_values, printable
from strata.cli.console.progress import byte_progress
from strata.core.checkpoints.lifecycle import RESTORABLE_TYPES
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointNotFound
from strata.training.run_diff import RANDOM, Compared, Contents, StepResult, compare_step, result_of

SHOWN_CHARS: Final = 60
"""Longer values are not printed beside each other."""
SHOWN_STEPS: Final = 8

Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore", metavar="PATH", help="Leave out this entry and those below it; may be given again."
    ),
]


def verify_run(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A storage root, as a path or URI, or a job's folder in it.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The other training's root or folder.")],
    ignore: Ignore = None,
    job: Job = "default",
    as_json: Json = False,
) -> None:
    """Compare two trainings bit by bit, at each step of which both have a checkpoint. Changes nothing.

    The exit status is 1 if they differ. The output names the first step and the first tensor that differ.

    Example: strata verify-run /data/run-a /data/run-b --ignore strata.rng
    """
    try:
        runs = _Run.at(a, job), _Run.at(b, job)
        report = _compare(*runs, ignored=ignore or ())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_values(as_values(report))
    else:
        _print(report)
    if not report.equal:
        raise typer.Exit(Exit.FAILURE)


# -- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One training: its root, and its newest committed checkpoint of each step."""

    source: StorageSource
    checkpoints: Mapping[int, CheckpointMetadata]
    corrupt: tuple[int, ...]
    """The steps of which only corrupt checkpoints exist."""

    @classmethod
    def at(cls, where: str, job: str) -> _Run:
        source = storage_source(where, job)
        known = [c for c in source.all() if c.checkpoint_type in RESTORABLE_TYPES]
        whole = {c.step: c for c in known if c.state is CheckpointState.COMMITTED}
        return cls(
            source=source,
            checkpoints=whole,
            corrupt=tuple(sorted({c.step for c in known if c.state is CheckpointState.CORRUPT} - set(whole))),
        )

    def side(self, common: Sequence[int]) -> Side:
        only = tuple(sorted(self.checkpoints.keys() - set(common)))
        return Side(title=self.source.title, only=only, corrupt=self.corrupt)

    def contents(self, step: int) -> tuple[Storage, Contents]:
        checkpoint = self.checkpoints[step]
        storage, folder = self.source.place(checkpoint)
        manifest, ranks = manifests_of(self.source, checkpoint)
        return storage, Contents(folder=folder, manifest=manifest, ranks=ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two trainings, with the steps that could not be compared."""

    title: str
    only: tuple[int, ...]
    """The steps that the other training has no committed checkpoint of."""
    corrupt: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result: the compared steps in order, and the result of one of them.

    `shown` is the first step that differs. If only random states differ, it is the first step with such a difference;
    if nothing differs, the last step.
    """

    a: Side
    b: Side
    steps: tuple[int, ...]
    shown: StepResult
    random_from: int | None
    """The first step at which random states differ."""

    @property
    def equal(self) -> bool:
        return self.shown.first is None


def _compare(a: _Run, b: _Run, *, ignored: Sequence[str]) -> Report:
    """Compare all common steps, up to the first that differs in more than random states."""
    common = sorted(a.checkpoints.keys() & b.checkpoints.keys())
    if not common:
        raise CheckpointNotFound(
            f"no step is committed in both: {a.source.title} has {_steps(sorted(a.checkpoints))},"
            f" {b.source.title} has {_steps(sorted(b.checkpoints))}",
            hint="save both trainings at the same steps, such as save_every_steps=100, and keep the checkpoints",
        )
    done: list[StepResult] = []
    for step in common:
        done.append(_compare_step(step, a, b, ignored))
        if not done[-1].only_random:
            break
    random = next((result for result in done if result.different[RANDOM]), None)
    return Report(
        a=a.side(common),
        b=b.side(common),
        steps=tuple(common[: len(done)]),
        shown=random if random is not None and done[-1].only_random else done[-1],
        random_from=random.step if random is not None else None,
    )


def _compare_step(step: int, a: _Run, b: _Run, ignored: Sequence[str]) -> StepResult:
    (storage_a, one), (storage_b, other) = a.contents(step), b.contents(step)
    entries = compare_step(one, other, ignored=ignored)
    reader = _Reader(
        Assembler(storage_a, one.folder, one.ranks), Assembler(storage_b, other.folder, other.ranks)
    )
    entries = reader.decided(f"step {step}", entries)
    first = next((number for number, entry in enumerate(entries) if not entry.same), None)
    if first is not None:
        entries[first] = reader.counted(f"step {step}", entries[first])
    return result_of(step, entries)


class _Reader:
    """Reads pairs of tensors from both checkpoints of a step, with progress on stderr."""

    def __init__(self, a: Assembler, b: Assembler) -> None:
        self._a = a
        self._b = b

    def decided(self, what: str, entries: Sequence[Compared]) -> list[Compared]:
        """Return the entries, after the bytes of those that the digests do not decide were read."""
        unread_bytes = sum(entry.pair.size_bytes for entry in entries if entry.same is None)
        if not unread_bytes:
            return list(entries)
        with byte_progress(what, unread_bytes) as advance:
            return [
                entry.read(self._read(entry.pair, advance)) if entry.same is None else entry
                for entry in entries
            ]

    def counted(self, what: str, entry: Compared) -> Compared:
        """Return the entry with the number of elements that differ, if both values are tensors of one shape."""
        a, b = entry.pair.a, entry.pair.b
        if entry.elements is not None or not (isinstance(a, WholeTensor) and isinstance(b, WholeTensor)):
            return entry
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return entry
        with byte_progress(f"{what}, {entry.pair.path}", entry.pair.size_bytes) as advance:
            return entry.read(self._read(entry.pair, advance))

    def _read(self, pair: Pair, advance: OnBytes) -> ElementDifference | None:
        assert isinstance(pair.a, WholeTensor)
        assert isinstance(pair.b, WholeTensor)
        return element_difference(
            pair.path, (self._a, pair.a.stored), (self._b, pair.b.stored), on_bytes=advance
        )


# -- output -------------------------------------------------------------------------------------


def as_values(report: Report) -> dict[str, Any]:
    """Return the report as the document of `--json`."""
    shown = report.shown
    return {
        "a": _side_as_values(report.a),
        "b": _side_as_values(report.b),
        "equal": report.equal,
        "steps": list(report.steps),
        "step": shown.step,
        "groups": {
            group: {"compared": number, "different": list(shown.different[group])}
            for group, number in shown.compared.items()
        },
        "first": _first_as_values(shown.first) if shown.first is not None else None,
        "random_from": report.random_from,
    }


def _side_as_values(side: Side) -> dict[str, Any]:
    return {"root": side.title, "only": list(side.only), "corrupt": list(side.corrupt)}


def _first_as_values(entry: Compared) -> dict[str, Any]:
    pair, elements = entry.pair, entry.elements
    largest = elements.largest if elements is not None else None
    return {
        "group": entry.group,
        "path": pair.path,
        "ranks": list(pair.ranks) or None,
        "a": None if pair.a is None else str(pair.a),
        "b": None if pair.b is None else str(pair.b),
        "elements": elements.elements if elements is not None else None,
        "different": elements.different if elements is not None else None,
        # JSON has no infinity and no NaN
        "largest": largest if largest is None or math.isfinite(largest) else repr(largest),
    }


def _print(report: Report) -> None:
    shown = report.shown
    sides = {"A": report.a, "B": report.b}
    _write(*(f"{name}: {side.title}" for name, side in sides.items()))
    for name, side in sides.items():
        if side.only:
            _write(f"only in {name}, not compared: {_steps(side.only)}")
        if side.corrupt:
            _write(f"corrupt in {name}, not compared: {_steps(side.corrupt)}")
    print_table(
        _title(report),
        ("GROUP", "COMPARED", "DIFFERENT", "FIRST"),
        (
            (group, number, len(paths), paths[0] if paths else "")
            for group, number in shown.compared.items()
            if number
            for paths in (shown.different[group],)
        ),
        empty=f"step {shown.step}: nothing is left to compare",
    )
    if shown.first is not None:
        _write(difference_text(shown.first))
    if report.random_from is not None and report.random_from != shown.step:
        _write(f"the random states differ from step {report.random_from} on")
    if not report.equal and shown.only_random:
        _write("only random states differ; --ignore strata.rng leaves them out")
    _write("equal" if report.equal else "differ")


def _title(report: Report) -> str:
    step, before = report.shown.step, report.steps.index(report.shown.step)
    if report.equal:
        return f"{_equal_steps(len(report.steps))}; the last, step {step}:"
    return (
        f"{_equal_steps(before)}, then step {step} differs:"
        if before
        else f"step {step}, the first, differs:"
    )


def _equal_steps(number: int) -> str:
    return "1 step is equal" if number == 1 else f"{number} steps are equal"


def difference_text(entry: Compared) -> str:
    """Return one line about an entry that differs."""
    pair, elements = entry.pair, entry.elements
    on = f" on rank {', '.join(map(str, pair.ranks))}" if pair.ranks else ""
    if pair.a is None or pair.b is None:
        text = f"only in {'A' if pair.b is None else 'B'}"
    elif elements is None:
        text = _both_text(pair.a, pair.b)
    elif elements.different is None:
        text = f"{pair.a}, and elements differ (NumPy, which would count them, is not installed)"
    else:
        text = f"{pair.a}, {elements.different:,} of {elements.elements:,} elements differ"
        if elements.largest is not None:
            text += f", by at most {elements.largest:.6g}"
    return f"{pair.path}{on}: {text}"


def _both_text(a: Value, b: Value) -> str:
    if str(a) == str(b) or max(len(str(a)), len(str(b))) > SHOWN_CHARS:
        return "the values differ"
    return f"{a} in A, {b} in B"


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "no step"
    few = ", ".join(map(str, steps[:SHOWN_STEPS]))
    more = f" … {steps[-1]}" if len(steps) > SHOWN_STEPS else ""
    return f"step {few}" if len(steps) == 1 else f"the steps {few}{more}"


def _write(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(f"{printable(line)}\n")
