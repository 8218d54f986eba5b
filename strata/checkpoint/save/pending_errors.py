"""Errors of one rank's saves that are not reported yet: raised once, or printed at the end of the process.

There are two kinds: the errors of saves, kept in their handles, and the errors of work after a save.
"""

from __future__ import annotations

import sys
from collections import deque

from strata.checkpoint.save.handle import CheckpointInfo


def print_on_stderr(text: str) -> None:
    """Print a line on stderr: the log may go nowhere, or be shut down already."""
    if sys.stderr is not None:
        sys.stderr.write(f"strata: {text}\n")
        sys.stderr.flush()


class PendingErrors:
    """The errors not reported yet. Any thread may add errors; all other methods are for the user's thread."""

    def __init__(self) -> None:
        self._infos: list[CheckpointInfo] = []
        self._later_errors: deque[BaseException] = deque()

    def follow(self, info: CheckpointInfo) -> None:
        """Report the error of this save, if it fails."""
        self._infos = [other for other in self._infos if other.unreported or not other.done]
        self._infos.append(info)

    def forget(self, info: CheckpointInfo) -> None:
        """Stop following this save: its caller reports the error."""
        self._infos = [other for other in self._infos if other is not info]

    def give_way(self) -> None:
        """Request that every unfinished save be aborted, as dropped rather than failed."""
        for info in self._infos:
            info.give_way()

    def add(self, error: BaseException) -> None:
        """Add an error of work after a save."""
        self._later_errors.append(error)

    @property
    def unfinished(self) -> list[int]:
        """The steps of the unfinished saves."""
        return [info.step for info in self._infos if not info.done]

    @property
    def awaited(self) -> str:
        """The unfinished work as text: saves, with the bytes that this rank has written, or work after a save."""
        saves = [
            f"the save of step {info.step} ({info.bytes_written} of {info.bytes_total} bytes are written)"
            for info in self._infos
            if not info.done
        ]
        return ", ".join(saves) or "the work after a save: to report it, to remove old checkpoints"

    @property
    def written(self) -> list[int]:
        """The bytes written of each save; a changed value means progress."""
        return [info.bytes_written for info in self._infos]

    def raise_first(self) -> None:
        """Raise the first error, if any, with the others as notes; all of them count as reported."""
        failed = [info for info in self._infos if info.unreported]
        self._infos = [info for info in self._infos if not info.done]
        later = self._take_later_errors()
        for other in failed[1:]:
            other.note_in(failed[0])
        first = failed[0].error if failed else later.pop(0) if later else None
        if first is None:
            return
        for error in later:
            first.add_note(f"and after a save: {error}")
        if failed:
            failed[0].raise_error()
        raise first

    def print_all(self) -> None:
        """Print the errors on stderr, because the process ends before they were raised."""
        for info in self._infos:
            if info.unreported:
                print_on_stderr(
                    f"the save of step {info.step} failed, and no call reported it: {info.take_error_text()}"
                )
        for error in self._take_later_errors():
            print_on_stderr(f"an error after a save, which no call reported: {error}")

    def _take_later_errors(self) -> list[BaseException]:
        return [self._later_errors.popleft() for _ in range(len(self._later_errors))]
