"""Child processes whose output a test waits for, instead of sleeping.

    record = Record()
    node = Talker(["strata", "run", ...], name="node-1", record=record)
    started = record.wait("start", count=3, generation=2)      # events: the lines that are JSON
    assert node.join() == 0
    node.wait_quiet()                                          # no process holds its output any more

A thread reads each process's output as it is written, so each event has the time at which it was received. All
descendants of a process inherit its output, so the end of the output proves that none of them is left.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from strata.integrations.torchrun.orphans import environment
from strata.processes.children import Child

LIMIT_S = 40.0
"""How long to wait for an event that must happen: far longer than it takes on a busy machine."""
MARK = "TALKER_MARK"
"""An environment variable of every process that a talker starts, and of all descendants."""

Event = dict[str, Any]
_T = TypeVar("_T")


class Record:
    """All events of a test's processes, in the order in which they were received."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    @property
    def events(self) -> list[Event]:
        with self._changed:
            return list(self._events)

    def of(self, kind: str, **facts: object) -> list[Event]:
        """Return the events of one kind that have these fields."""
        return _chosen(self.events, kind, facts)

    def until(self, what: str, found: Callable[[list[Event]], _T], *, limit_s: float = LIMIT_S) -> _T:
        """Return the first true answer of `found` over all events; fail with the events received so far.

        The wait fails once no event at all arrives for `limit_s`: it is no limit of the whole wait, because a
        training is slow on a busy machine. If other processes keep writing, only the test's own time limit ends the
        wait.
        """
        with self._changed:
            while not (answer := found(self._events)):
                if not self._changed.wait(limit_s):
                    printed = _reported(self._events)
                    raise AssertionError(
                        f"{what} was not heard, nor anything for {limit_s:g} s; heard:\n{printed}"
                    )
            return answer

    def wait(self, kind: str, *, count: int = 1, limit_s: float = LIMIT_S, **facts: object) -> list[Event]:
        """Return the events of one kind that have these fields, once there are `count` of them."""

        def enough(events: list[Event]) -> list[Event]:
            chosen = _chosen(events, kind, facts)
            return chosen if len(chosen) >= count else []

        return self.until(f"{count} x {kind} {facts}", enough, limit_s=limit_s)

    def wait_one(self, kind: str, *, limit_s: float = LIMIT_S, **facts: object) -> Event:
        """Return the first event of one kind that has these fields."""
        return self.wait(kind, count=1, limit_s=limit_s, **facts)[0]

    def wait_line(self, part: str, *, limit_s: float = LIMIT_S) -> str:
        """Return the first line that contains `part`, among the lines that are no events."""

        def line(events: list[Event]) -> str:
            return next((e["text"] for e in events if e["event"] == "line" and part in e["text"]), "")

        return self.until(f"a line with {part!r}", line, limit_s=limit_s)


def _reported(events: Sequence[Event]) -> str:
    """Return the last events as text for a failed test; of the frequent kinds, only the last six."""
    crowd = [e for e in events if e["event"] in {"epoch", "step"}][-6:]
    return "\n".join(str(e) for e in events if e["event"] not in {"epoch", "step"} or e in crowd)[-8000:]


def _chosen(events: list[Event], kind: str, facts: Mapping[str, object]) -> list[Event]:
    return [e for e in events if e["event"] == kind and all(e.get(k) == v for k, v in facts.items())]


class Talker:
    """A child process, and its output and that of its children. The `source` of these events is the talker's name."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        record: Record,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        new_session: bool = False,
    ) -> None:
        self.name = name
        self.record = record
        self.mark = uuid.uuid4().hex
        self._quiet = threading.Event()
        ours, theirs = os.pipe()
        try:
            self.child = Child.start(
                argv,
                name=name,
                env={**(os.environ if env is None else env), MARK: self.mark},
                cwd=cwd,
                stdout=theirs,
                stderr=theirs,
                new_session=new_session,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        threading.Thread(target=self._listen, args=(ours,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self.child.pid

    def signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        self.child.send_signal(number)

    def join(self, limit_s: float = LIMIT_S) -> int:
        """Return the exit code once the process has ended and all of its output was read.

        The children of the process may still run and write. The wait fails once no event at all arrives for
        `limit_s`.
        """
        received = len(self.record.events)
        while True:
            try:
                code = self.child.join(limit_s)
            except TimeoutError:
                events = self.record.events
                if len(events) == received:
                    printed = f"nothing for {limit_s:g} s; heard before:\n{_reported(events)}"
                    raise AssertionError(f"{self.name} runs, and said {printed}") from None
                received = len(events)
            else:
                self._quiet.wait(1.0)
                return code

    def wait_quiet(self, limit_s: float = LIMIT_S) -> None:
        """Return once no process is left that this process started, directly or not."""
        deadline = time.monotonic() + limit_s
        while left := self.family():
            if not all(wait_exit(pid, deadline - time.monotonic()) for pid in left):
                raise AssertionError(f"of {self.name} there are left: {self.family()}")
        assert self._quiet.wait(limit_s), f"somebody who hid its mark holds the output of {self.name}"

    def family(self) -> dict[int, str]:
        """Return the processes that carry this talker's mark: their command lines by pid."""
        return marked(self.mark)

    def _listen(self, fd: int) -> None:
        with open(fd, "rb") as pipe:
            for line in pipe:
                self.record.add(_event(line) | {"source": self.name, "heard": time.monotonic()})
        self._quiet.set()


def marked(mark: str) -> dict[int, str]:
    """Return the live processes whose environment holds the mark: their command lines by pid."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in environment(int(entry.name)).split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # the process has ended, is a zombie, or belongs to another user
    return found


def wait_exit(pid: int, limit_s: float) -> bool:
    """Return True once no such process runs (a zombie counts as ended), False after the limit."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(max(0.0, limit_s) * 1000))
    finally:
        os.close(fd)


def _event(line: bytes) -> Event:
    """Return the event in a line; part of another process's line may precede the JSON."""
    text = line.decode(errors="replace").rstrip("\n")
    begin = text.find('{"')
    if begin >= 0:
        try:
            body = json.loads(text[begin:])
        except ValueError:
            body = None
        if isinstance(body, dict) and "event" in body:
            return body
    return {"event": "line", "text": text}
