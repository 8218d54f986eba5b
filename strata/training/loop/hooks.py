"""What takes part in a training's steps, in the trainer's thread: `StepHook`.

A step is one of the optimizer's, over all ranks. It *begins* before its first batch is handed out,
and is *complete* once the body of the loop has returned from its last one.
"""

from __future__ import annotations

from typing import Protocol


class StepHook(Protocol):
    """Called in the trainer's thread; what it raises leaves the training loop."""

    def begins(self, step: int) -> None:
        """Step number `step` (from 1) is about to begin here; may wait, so as to hold this rank."""

    def completed(self, step: int) -> None:
        """Step `step` is complete and counted; a save that is due comes afterwards."""

    def closing(self) -> None:
        """The loop is over, and the run is about to end as a success, with its last save."""

    def closed(self) -> None:
        """The run ends in this process, or adopts another world before its first step; nothing is called afterwards."""
