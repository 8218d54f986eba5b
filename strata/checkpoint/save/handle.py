"""`CheckpointInfo`: what a save returns at once, and by which it is followed."""

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
"""Called after each block by a thread that writes, one at a time; what it raises ends the save."""


class CheckpointInfo:
    """One save on its way to `committed`. May be used from any thread.

    `staged`: the state was copied, the trainer may change it. `committed`: the checkpoint is
    durable, complete, in the catalog, and marked in storage. `replicated`: so is a copy of it in the
    second storage.
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
        """Whether it was given up to make room for a newer one, or for an error of an earlier one; that is no
        failure."""
        self.replicated = False
        """Whether the second storage has it too, whole and marked; always False without one."""
        self.bytes_total = 0
        self.bytes_written = 0
        self.compared_s = 0.0
        """How long it was hashed and compared with what the other ranks hold, in the background."""
        self.phases: tuple[SavePhase, ...] = ()
        """What the phases of this rank's part took, once it is durable."""
        self.cancelled = threading.Event()
        """Set by `cancel`; the writing thread looks at it."""
        self.gives_way = False
        """Set before that by `give_way`."""
        self._progress = progress
        self._changed = threading.Condition()
        self.record: CheckpointMetadata | None = None
        """What the catalog said last, if it said anything yet."""
        self.committed = False
        self.error: BaseException | None = None
        """What the save failed of, or None."""
        self._on_commit: list[Callable[[], None]] = []
        self._reported = False

    def __repr__(self) -> str:
        state = "committed" if self.committed else "failed" if self.error else "in flight"
        return f"<CheckpointInfo step={self.step} {state}>"

    # -- what a user looks at

    @property
    def path(self) -> str:
        """The URI of the checkpoint's folder; waits until the catalog has named it."""
        return self._begun().path

    @property
    def id(self) -> str:
        """The attempt's id; waits until the catalog has named it."""
        return self._begun().id

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self.committed or self.error is not None

    @property
    def size_bytes(self) -> int:
        """The size of all images once it is committed, of this rank's before."""
        record = self.record
        return record.size_bytes if record is not None and record.size_bytes else self.bytes_total

    def wait(self, timeout_s: float | None = None) -> CheckpointInfo:
        """Return once committed; raise what the save failed of, or `Unavailable` after `timeout_s`."""
        timeout_s = timeout(timeout_s, zero=True)
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout_s):
                raise Unavailable(f"the save of step {self.step} is not done after {timeout_s:g} s", hint="")
        self.raise_error()
        return self

    def on_commit(self, heard: Callable[[], None]) -> None:
        """Have `heard` called before `committed` is seen by anybody; at once where it is.

        By the thread that writes, which it must not hold up; what it raises there is logged.
        """
        with self._changed:
            if not self.committed:
                self._on_commit.append(heard)
                return
        heard()

    def cancel(self) -> bool:
        """Ask for the save to be given up, for all ranks; False when it is done already.

        A save that is being committed may still be; `wait` tells.
        """
        self.cancelled.set()
        return not self.done

    def give_way(self) -> None:
        """Give it up, for all ranks, while it or one before it is held: that is no failure, it counts as dropped."""
        self.gives_way = True
        self.cancelled.set()

    # -- what the writer says and asks

    def began(self, record: CheckpointMetadata) -> None:
        with self._changed:
            self.record = record
            self.checkpoint_type = record.checkpoint_type  # a Full may come of an Incremental
            self._changed.notify_all()

    def stage(self) -> None:
        """Say that the state may be changed."""
        with self._changed:
            self.staged = True
            self._changed.notify_all()

    def wait_until_staged(self) -> None:
        """Return once the state may be changed: it is copied, or written, or not saved at all."""
        with self._changed:
            self._changed.wait_for(lambda: self.staged or self.done)

    def advanced(self, count_bytes: int) -> None:
        self.bytes_written += count_bytes
        if self._progress is not None:
            self._progress(self)

    def succeed(self, record: CheckpointMetadata) -> None:
        with self._changed:
            self.record = record
            for heard in self._on_commit:
                try:
                    heard()
                except Exception:  # it is committed all the same, and whoever waits has to learn it
                    log.exception("what was to hear that step %d is committed failed", self.step)
            self.committed = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()

    @property
    def unreported(self) -> bool:
        """Whether it failed and nobody was told."""
        return self.error is not None and not self._reported and not self.dropped

    def raise_error(self) -> None:
        """Raise what the save failed of, if it did; that counts as told."""
        if self.error is None:
            return
        self._reported = True
        if isinstance(self.error, StrataError):
            raise self.error
        raise CheckpointError(
            f"the save of step {self.step} failed: {str(self.error) or type(self.error).__name__}"
        ) from self.error

    def told(self) -> str:
        """Say what the save failed of; that counts as told."""
        self._reported = True
        return str(self.error) or type(self.error).__name__

    def note_in(self, other: CheckpointInfo) -> None:
        """Let the error of `other` tell of this one's too."""
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
