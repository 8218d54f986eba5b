"""`CheckpointInfo`: the handle of a save in progress, by which the caller follows the save."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from strata.checkpoint.catalog.protocol import CheckpointMetadata, SavePhase
from strata.core.kv.records import CheckpointType
from strata.core.spans import timeout
from strata.errors import CheckpointError, StrataError, Unavailable

log: Final = logging.getLogger("strata.checkpoint")

Progress = Callable[["CheckpointInfo"], None]
"""Called after each block, by one writing thread at a time; an exception from it ends the save."""


class CheckpointInfo:
    """One save on its way to `committed`. May be used from any thread.

    `staged`: the state is copied, and the trainer may change it. `committed`: the checkpoint is durable,
    complete, in the catalog, and marked in storage. `replicated`: the second storage has a copy of it, too.
    """

    def __init__(
        self,
        *,
        step: int,
        epoch: int,
        checkpoint_type: CheckpointType,
        metadata: Mapping[str, str],
        progress: Progress | None = None,
    ) -> None:
        self.step = step
        self.epoch = epoch
        self.checkpoint_type = checkpoint_type
        self.metadata = dict(metadata)
        self.staged = False
        self.dropped = False
        """Whether the save was aborted for a newer save, or because an earlier save failed. This is not a failure."""
        self.replicated = False
        """Whether the second storage has a complete, marked copy; always False if no second storage is configured."""
        self.bytes_total = 0
        self.bytes_written = 0
        self.compared_s = 0.0
        """The seconds of hashing and of comparing with the other ranks, in the background."""
        self.phases: tuple[SavePhase, ...] = ()
        """The phases of writing this rank's part, with their durations; empty until the part is durable."""
        self.cancelled = threading.Event()
        """Set by `cancel`; the writing thread checks it."""
        self.gives_way = False
        """Set by `give_way`, before it sets `cancelled`."""
        self._progress = progress
        self._changed = threading.Condition()
        self.record: CheckpointMetadata | None = None
        """The catalog's latest record of the attempt; None before the first."""
        self.committed = False
        self.error: BaseException | None = None
        """The error that ended the save, or None."""
        self._on_commit: list[Callable[[], None]] = []
        self._reported = False

    def __repr__(self) -> str:
        state = "committed" if self.committed else "failed" if self.error else "in flight"
        return f"<CheckpointInfo step={self.step} {state}>"

    # -- for the user

    @property
    def path(self) -> str:
        """The URI of the checkpoint's folder; waits until the catalog has named the folder."""
        return self._begun().path

    @property
    def id(self) -> str:
        """The attempt's id; waits until the catalog has assigned it."""
        return self._begun().id

    @property
    def done(self) -> bool:
        """Whether the save has ended, committed or failed."""
        return self.committed or self.error is not None

    @property
    def size_bytes(self) -> int:
        """The size of all images once the save is committed; before that, of this rank's image."""
        record = self.record
        return record.size_bytes if record is not None and record.size_bytes else self.bytes_total

    def wait(self, timeout_s: float | None = None) -> CheckpointInfo:
        """Return once committed; raise the save's error, or `Unavailable` after `timeout_s`."""
        timeout_s = timeout(timeout_s, zero=True)
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout_s):
                raise Unavailable(f"the save of step {self.step} is not done after {timeout_s:g} s", hint="")
        self.raise_error()
        return self

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Call `callback` after the commit, before waiters on the event `committed` wake.

        If the save is committed already, call `callback` in this thread. Otherwise the writing thread calls
        `callback`: it must not block, and its exception is only logged.
        """
        with self._changed:
            if not self.committed:
                self._on_commit.append(callback)
                return
        callback()

    def cancel(self) -> bool:
        """Request that the save be aborted on all ranks; return False if it has ended already.

        The save may still commit if its commit is in progress; `wait` then returns; otherwise `wait` raises.
        """
        self.cancelled.set()
        return not self.done

    def give_way(self) -> None:
        """Abort this save on all ranks, as dropped rather than failed: this or an earlier save waits for storage."""
        self.gives_way = True
        self.cancelled.set()

    # -- for the writer

    def began(self, record: CheckpointMetadata) -> None:
        with self._changed:
            self.record = record
            self.checkpoint_type = record.checkpoint_type  # an Incremental may become a Full
            self._changed.notify_all()

    def stage(self) -> None:
        """Record that the trainer may change the state."""
        with self._changed:
            self.staged = True
            self._changed.notify_all()

    def wait_until_staged(self) -> None:
        """Return once the trainer may change the state: the state is copied or written, or the save has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.staged or self.done)

    def advanced(self, count_bytes: int) -> None:
        self.bytes_written += count_bytes
        if self._progress is not None:
            self._progress(self)

    def succeed(self, record: CheckpointMetadata) -> None:
        with self._changed:
            self.record = record
            for callback in self._on_commit:
                try:
                    callback()
                except Exception:  # the save is still committed, and threads in `wait` must return
                    log.exception("a callback for the commit of step %d failed", self.step)
            self.committed = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()

    @property
    def unreported(self) -> bool:
        """Whether the save failed and its error was not yet raised or printed."""
        return self.error is not None and not self._reported and not self.dropped

    def raise_error(self) -> None:
        """Raise the save's error, if it failed; the error then counts as reported."""
        if self.error is None:
            return
        self._reported = True
        if isinstance(self.error, StrataError):
            raise self.error
        raise CheckpointError(
            f"the save of step {self.step} failed: {str(self.error) or type(self.error).__name__}"
        ) from self.error

    def take_error_text(self) -> str:
        """Return the text of the save's error; the error then counts as reported."""
        self._reported = True
        return str(self.error) or type(self.error).__name__

    def note_in(self, other: CheckpointInfo) -> None:
        """Add this save's error as a note to the error of `other`, if `other` failed."""
        if other.error is not None:
            other.error.add_note(f"the save of step {self.step} failed as well: {self.error}")
            self._reported = True

    def _begun(self) -> CheckpointMetadata:
        with self._changed:
            self._changed.wait_for(lambda: self.record is not None or self.done)
        if self.record is None:
            self.raise_error()
        assert self.record is not None
        return self.record
