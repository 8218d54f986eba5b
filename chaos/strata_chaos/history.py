"""Histories: JSON lines of operations and events, written by clients, nemesis and observer for the checkers.

Only one process writes a history, and it only appends. Each line is one `write` to a file opened for appending. A
killed process therefore leaves whole lines, except that its last line may be torn. The writer buffers nothing: a
record survives the death of its process. Limit: it may not survive the death of the machine, which would end the run
anyway.

An operation leaves one line when it ends. An *announced* operation also leaves a line at its start, with `t1` null
and the same `id`. If an announced operation has no second line, its process died during it, and its outcome is
unknown. `docs/chaos/history.md` describes each field.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

SCHEMA: Final = 1


class HistoryError(Exception):
    """A file is not a valid history; the message names the line and the error."""


class Outcome(StrEnum):
    """How an operation ended, as far as its caller knows."""

    OK = "ok"
    FAIL = "fail"
    """The operation certainly had no effect."""
    UNKNOWN = "unknown"
    """The operation may take effect now, later or never: checkers must allow for all three."""


class Where(NamedTuple):
    """File and number of a history line."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


NOWHERE: Final = Where("", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error that the caller got: its class and its message."""

    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of a history. Times are seconds of CLOCK_BOOTTIME, which all processes of a machine share."""

    client: str
    process: int
    op: str
    t0: float
    t1: float | None
    outcome: Outcome
    args: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    error: Failure | None = None
    id: str = ""
    where: Where = NOWHERE

    @property
    def begun(self) -> bool:
        """Whether this line announces the start of an operation."""
        return self.t1 is None


class HistoryWriter:
    """Appends records to one file. Any thread of one process may call it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.close(self._fd)
            raise HistoryError(f"{path} ends in a torn line: a new process writes a new file")

    def write(self, *records: Record) -> None:
        """Append the records together. Once this returns, they survive the death of the process."""
        data = b"".join(encode(record) for record in records)
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def encode(record: Record) -> bytes:
    """Return the line of a record, with its newline."""
    body: dict[str, Any] = {"v": SCHEMA, "client": record.client, "process": record.process}
    if record.id:
        body["id"] = record.id
    body |= {"op": record.op, "t0": record.t0, "t1": record.t1, "args": record.args}
    body |= {"outcome": record.outcome.value, "result": record.result}
    if record.error is not None:
        body["error"] = {"type": record.error.type, "message": record.error.message}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def decode(line: bytes | str, where: Where = NOWHERE) -> Record:
    """Return the record of a line; a `HistoryError` names the defect."""
    try:
        body = json.loads(line)
    except ValueError as error:
        raise HistoryError(f"{where}: not JSON: {error}") from None
    if not isinstance(body, dict):
        raise HistoryError(f"{where}: not an object")
    try:
        if body["v"] != SCHEMA:
            raise HistoryError(f"{where}: schema {body['v']!r}; this version reads {SCHEMA}")
        if wrong := _wrong(body):
            raise HistoryError(f"{where}: {wrong}")
        failure = body.get("error")
        return Record(
            client=body["client"],
            process=body["process"],
            op=body["op"],
            t0=body["t0"],
            t1=body["t1"],
            outcome=_OUTCOMES[body["outcome"]],
            args=body["args"],
            result=body["result"],
            error=Failure(type=failure["type"], message=failure["message"]) if failure else None,
            id=body.get("id", ""),
            where=where,
        )
    except (KeyError, TypeError) as missing:
        raise HistoryError(f"{where}: no such field or value: {missing}") from None


_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}


def _wrong(body: dict[str, Any]) -> str:
    """Return which field has an invalid value, in words; empty if all are valid."""
    t0, t1 = body["t0"], body["t1"]
    if not (isinstance(body["client"], str) and isinstance(body["op"], str)):
        return "client and op are texts"
    if not (isinstance(body["args"], dict) and isinstance(body["result"], dict)):
        return "args and result are objects"
    if not isinstance(t0, int | float) or not isinstance(t1, int | float | None):
        return "t0 and t1 are numbers"
    if t1 is None:
        if body["outcome"] != "unknown" or not body.get("id"):
            return "a beginning has an id, and its outcome is unknown"
    elif t1 < t0:
        return f"it ended {t0 - t1:g} s before it began"
    return ""


class History:
    """All histories of a folder, or one file, read as a stream. It can be iterated more than once.

    A killed process may leave a torn last line: the line is noted in `torn` and skipped. Any other line that is not a
    record raises `HistoryError`, because a checker must not guess.
    """

    def __init__(self, path: Path) -> None:
        self.files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        self.root = path if path.is_dir() else path.parent
        self.torn: dict[str, str] = {}

    def __iter__(self) -> Iterator[Record]:
        for file in self.files:
            yield from self.of(file)

    def of(self, file: Path) -> Iterator[Record]:
        """Yield the records of one of the files."""
        name = str(file.relative_to(self.root))
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n"):
                    yield decode(line, Where(name, number))
                else:
                    self.torn[name] = f"{name}:{number}: torn after {len(line)} bytes"

    def quote(self, places: set[Where]) -> dict[Where, str]:
        """Return the text of the lines at these places."""
        found: dict[Where, str] = {}
        for file in self.files:
            name = str(file.relative_to(self.root))
            numbers = {place.line for place in places if place.file == name}
            if numbers:
                with file.open(encoding="utf-8", errors="replace") as lines:
                    for number, line in enumerate(lines, 1):
                        if number in numbers:
                            found[Where(name, number)] = line.rstrip("\n")
        return found
