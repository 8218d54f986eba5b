"""`StepHook`: callbacks around the steps of a training, in the trainer's thread.

A step is one optimizer step over all ranks. It *begins* before its first batch is handed out, and is *complete* once
the loop body of its last batch has ended.
"""

from __future__ import annotations

from typing import Protocol


class StepHook(Protocol):
    """Called in the trainer's thread; its exceptions leave the training loop."""

    def begins(self, step: int) -> None:
        """Step number `step` (from 1) is about to begin on this rank; the hook may block to delay this rank."""

    def completed(self, step: int) -> None:
        """Step `step` is complete and counted; a save that is due follows."""

    def closing(self) -> None:
        """The loop is over, and the run is about to make its last save and end as a success."""

    def closed(self) -> None:
        """The run ends in this process, or the process adopts a newer world before the run's first step; no further
        call follows.
        """
