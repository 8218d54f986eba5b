"""What happened, one JSON object a line: written by clients, nemesis and observer, judged later.

A history is written by one process and never rewritten. Each line goes out in one `write` to a file
opened for appending, so a process that is killed leaves whole lines and at most one torn one, the
last. Nothing is buffered here: what was recorded survives the death of the process (not that of
the machine, which would end the run anyway).

An operation leaves one line when it ends, and before it one more when it was *announced*: its start,
with `t1` null. The two share `id`. An announced operation without an end is one whose process died
meanwhile, and its outcome is unknown. What each field means is in `docs/chaos/history.md`.
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
    """A history file is not one; the message names the line and what is wrong with it."""


class Outcome(StrEnum):
    """How an operation ended, as far as who asked for it knows."""

    OK = "ok"
    FAIL = "fail"
    """It certainly did not do what was asked."""
    UNKNOWN = "unknown"
    """It may have had its effect, now or later: both must be reckoned with."""


class Where(NamedTuple):
    """The line that says so."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


NOWHERE: Final = Where("", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What the caller was told: the class of the error, and its message."""

    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line. Times are seconds of CLOCK_BOOTTIME, which all processes of a machine share."""

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
        """Whether this line only says that the operation began."""
        return self.t1 is None


class HistoryWriter:
    """Appends records to one file. From any thread; for one process."""

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
        """Append the records together; once this returns they survive the process."""
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
    """Return the line of a record, its end included."""
    body: dict[str, Any] = {"v": SCHEMA, "client": record.client, "process": record.process}
    if record.id:
        body["id"] = record.id
    body |= {"op": record.op, "t0": record.t0, "t1": record.t1, "args": record.args}
    body |= {"outcome": record.outcome.value, "result": record.result}
    if record.error is not None:
        body["error"] = {"type": record.error.type, "message": record.error.message}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def decode(line: bytes | str, where: Where = NOWHERE) -> Record:
    """Return the record of a line; `HistoryError` says what is wrong with it."""
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
        told = body.get("error")
        return Record(
            client=body["client"],
            process=body["process"],
            op=body["op"],
            t0=body["t0"],
            t1=body["t1"],
            outcome=_OUTCOMES[body["outcome"]],
            args=body["args"],
            result=body["result"],
            error=Failure(type=told["type"], message=told["message"]) if told else None,
            id=body.get("id", ""),
            where=where,
        )
    except (KeyError, TypeError) as missing:
        raise HistoryError(f"{where}: no such field or value: {missing}") from None


_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}


def _wrong(body: dict[str, Any]) -> str:
    """Say which field does not hold what it should; nothing if all do."""
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
    """Every history of a folder, or one file, read as a stream; iterate as often as needed.

    A torn last line is what a killed process leaves: it is noted in `torn` and passed over. Anything
    else that is no record raises `HistoryError`, for a judge must not guess.
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
        """Return the lines at these places, as they were written."""
        found: dict[Where, str] = {}
        for file in self.files:
            name = str(file.relative_to(self.root))
            wanted = {place.line for place in places if place.file == name}
            if wanted:
                with file.open(encoding="utf-8", errors="replace") as lines:
                    for number, line in enumerate(lines, 1):
                        if number in wanted:
                            found[Where(name, number)] = line.rstrip("\n")
        return found
