"""Output of commands: tables on a terminal, JSON with `--json`, errors on stderr."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from google.protobuf.message import Message
from rich.cells import cell_len
from rich.console import Console

from strata.cli.console.completion import complete_jobs
from strata.core.words import ranks_text as ranks
from strata.errors import StrataError
from strata.observe.words import age, printable, size

__all__ = ["age", "printable", "ranks", "size"]

DEFAULT_ENDPOINTS = "127.0.0.1:50051"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Endpoints = Annotated[
    str,
    typer.Option(
        "--endpoints",
        "-e",
        envvar="STRATA_ENDPOINTS",
        help="Coordinators, as host:port, separated by commas.",
        show_default=DEFAULT_ENDPOINTS,
    ),
]
Job = Annotated[
    str,
    typer.Option(
        "--job",
        "-j",
        envvar="STRATA_JOB",
        help="The job's name.",
        show_default="default",
        autocompletion=complete_jobs,
    ),
]

TimeoutS = Annotated[
    float, typer.Option("--timeout-s", min=0.1, help="Seconds to wait for a coordinator that answers.")
]

DEFAULT_TIMEOUT_S = 5.0


def print_json(document: Message | Sequence[Message]) -> None:
    """Print protobuf messages as one JSON document, with every field and the proto's names."""
    if isinstance(document, Message):
        body: Any = _as_dict(document)
    else:
        body = [_as_dict(message) for message in document]
    sys.stdout.write(json.dumps(body, indent=2) + "\n")


def message_as_dict(message: Message) -> dict[str, Any]:
    """Return a protobuf message as `print_json` writes it."""
    return _as_dict(message)


def print_values(document: Any) -> None:
    """Print plain values as one JSON document."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    empty: str,
    dim_from: int = 1 << 30,
) -> None:
    """Print rows under their columns, in grey from row `dim_from` on; if there are no rows, print the sentence `empty`.

    Nothing is cut to the terminal's width, because a cut path or id is useless.
    """
    console = Console(highlight=False, emoji=False)
    lines = [tuple(columns), *(tuple(printable(str(cell)) for cell in row) for row in rows)]
    if len(lines) == 1:
        console.print(empty, markup=False, soft_wrap=True)
        return
    console.print(printable(title), style="italic", markup=False, soft_wrap=True)
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        text = "  ".join(padded).rstrip()
        style = "bold" if number == 0 else "dim" if number > dim_from else ""
        console.print(text, style=style, markup=False, soft_wrap=True)


def print_error(error: StrataError) -> None:
    """Print an error and its hint to stderr, without a traceback."""
    console = Console(stderr=True, highlight=False, emoji=False)
    console.print(f"error: {error.message}", style="red", markup=False, soft_wrap=True)
    if error.hint:
        console.print(f"hint: {error.hint}", markup=False, soft_wrap=True)


def _as_dict(message: Message) -> dict[str, Any]:
    """Return the message with every field, numbers as numbers and enums by their short names.

    protobuf's own JSON writes 64-bit numbers as strings, because JavaScript cannot represent such numbers. The
    readers of this output, jq and Python, can.
    """
    return {
        field.name: _field_as_json(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if field.message_type is None or field.is_repeated or message.HasField(field.name)
    }


def _field_as_json(field: Any, value: Any) -> Any:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        item = kind.fields_by_name["value"]
        return {str(key): _value_as_json(item, value[key]) for key in sorted(value)}
    if field.is_repeated:
        return [_value_as_json(field, item) for item in value]
    return _value_as_json(field, value)


def _value_as_json(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return _as_dict(value)
    if field.enum_type is not None:
        return enum_name(field.enum_type.values_by_number[value].name, field.enum_type.name)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def enum_name(value: str, enum: str) -> str:
    """Return the short name of an enum's value: JOB_PHASE_DONE becomes `done`."""
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum).upper() + "_"
    return value.removeprefix(prefix).lower()
