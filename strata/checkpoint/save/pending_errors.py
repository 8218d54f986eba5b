"""The errors of one rank's saves until somebody is told: raised once, or said at the end of the process.

There are those of saves, which their handles keep, and those of what follows a save.
"""

from __future__ import annotations

import sys
from collections import deque

from strata.checkpoint.save.handle import CheckpointInfo


def tell_on_stderr(text: str) -> None:
    """Say it on stderr: a log may go nowhere, or be shut down by now."""
    if sys.stderr is not None:
        sys.stderr.write(f"strata: {text}\n")
        sys.stderr.flush()


class PendingErrors:
    """What nobody was told of yet. Errors come from any thread; all else is for the user's."""

    def __init__(self) -> None:
        self._infos: list[CheckpointInfo] = []
        self._troubles: deque[BaseException] = deque()

    def follow(self, info: CheckpointInfo) -> None:
        """Keep the error of a save, if it comes to one."""
        self._infos = [other for other in self._infos if other.unreported or not other.done]
        self._infos.append(info)

    def forget(self, info: CheckpointInfo) -> None:
        """Leave it to the caller to tell."""
        self._infos = [other for other in self._infos if other is not info]

    def give_way(self) -> None:
        """Ask for every save that has not ended to be given up, as no failure."""
        for info in self._infos:
            info.give_way()

    def trouble(self, error: BaseException) -> None:
        """Keep what failed after a save."""
        self._troubles.append(error)

    @property
    def unfinished(self) -> list[int]:
        """The steps of the saves that have not ended."""
        return [info.step for info in self._infos if not info.done]

    @property
    def awaited(self) -> str:
        """What has not ended: saves, and how much of each is written here, or what follows them."""
        saves = [
            f"the save of step {info.step} ({info.bytes_written} of {info.bytes_total} bytes are written)"
            for info in self._infos
            if not info.done
        ]
        return ", ".join(saves) or "what follows a save: to tell of it, to remove old checkpoints"

    @property
    def written(self) -> list[int]:
        """How many bytes of each save are written: another answer later is progress."""
        return [info.bytes_written for info in self._infos]

    def raise_first(self) -> None:
        """Raise the first error, with notes of the others, unless there is none; all count as told."""
        failed = [info for info in self._infos if info.unreported]
        self._infos = [info for info in self._infos if not info.done]
        troubles = self._take_findings()
        for other in failed[1:]:
            other.note_in(failed[0])
        first = failed[0].error if failed else troubles.pop(0) if troubles else None
        if first is None:
            return
        for trouble in troubles:
            first.add_note(f"and after a save: {trouble}")
        if failed:
            failed[0].raise_error()
        raise first

    def say(self) -> None:
        """Say them on stderr: the process ends, and nobody asked."""
        for info in self._infos:
            if info.unreported:
                tell_on_stderr(f"nobody was told that the save of step {info.step} failed: {info.told()}")
        for trouble in self._take_findings():
            tell_on_stderr(f"nobody was told what failed after a save: {trouble}")

    def _take_findings(self) -> list[BaseException]:
        return [self._troubles.popleft() for _ in range(len(self._troubles))]
