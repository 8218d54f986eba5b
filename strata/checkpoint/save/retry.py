"""`SaveRetry`: a save is held (kept and retried) while the storage has a transient failure.

    a write is refused ─▶ held ─▶ tried again after 1, 2, 4 … 30 s ─▶ accepted: the save goes on
                            │                                      └─▶ `grace_s` over: the save ends
                            └─▶ the attempt is aborted or cancelled: the hold ends

Until a checkpoint is committed, one grace covers all refused objects of all saves. An accepted object does not renew
the grace: a storage that accepts only one object in ten completes no checkpoint.

Each try writes the whole object again, from the save's snapshot. With two tiers, each try writes the object to the
near tier or, if the near tier refuses the object, to the far one; a reader takes each object from the tier that has
it. The writer's thread does all of this; `hold` may be read from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NoReturn, TypeVar

from strata.core.stop.save_hold import SaveHold, no_checkpoint
from strata.errors import CheckpointAborted, StorageError

GRACE_S: Final = 900.0
"""The default for how long a rank retries a save."""
PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""The pauses after consecutive refusals; the last one repeats."""

_T = TypeVar("_T")

log: Final = logging.getLogger("strata.checkpoint")


class HoldOver(CheckpointAborted):
    """A held save ended without a checkpoint. It counts as dropped: the process reacts to the end of the hold."""


class SaveRetry:
    """The holds of one rank's saves, one after the other.

    A hold ends `grace_s` after the first refusal since the newest commit; if `grace_s` is 0, no save is ever held.
    `tell` is called with each hold, and with None at the end of the hold.
    """

    def __init__(
        self,
        *,
        grace_s: float = 0.0,
        tell: Callable[[SaveHold | None], None] = lambda hold: None,
        now: Callable[[], float] = time.monotonic,
        pauses_s: Sequence[float] = PAUSES_S,
        meanwhile: str = "training goes on",
    ) -> None:
        """`meanwhile` is a clause for the log: what the process does during the retries."""
        self.grace_s = grace_s
        self._meanwhile = meanwhile
        self.on_over: Callable[[str], None] | None = None
        """Called with the reason when the grace of a hold is over. If None, the storage's error ends the save."""
        self.committed_step: int | None = None
        """The step of the newest committed checkpoint that this rank knows."""
        self._tell = tell
        self._now = now
        self._pauses_s = pauses_s
        self._hold: SaveHold | None = None
        self._since_s: float | None = None
        """The time of the first refusal since the newest commit."""
        self._refused_s = 0.0
        """The time of the last refusal."""

    @property
    def hold(self) -> SaveHold | None:
        """The reason why no save can complete at this moment; None if no reason is known."""
        hold, since_s = self._hold, self._since_s
        return hold if hold is None or since_s is None else replace(hold, held_s=self._now() - since_s)

    def committed(self, step: int) -> None:
        """Record a committed checkpoint: the next refusal begins a new grace."""
        self.committed_step, self._since_s = step, None

    def first(self, acts: Sequence[Callable[[], _T]], *, step: int, pause: Callable[[float], None]) -> _T:
        """Return the result of the first of `acts` that the storage accepts; retry them until one is accepted.

        `pause` waits for the given seconds; it raises if the save was aborted.
        """
        refusals = 0
        try:
            while True:
                try:
                    done = first_taken(acts)
                except StorageError as error:
                    if not error.transient or not self.grace_s:
                        raise
                    left_s = self._held(error, step)
                    if left_s <= 0:
                        self._give_up(error)
                else:
                    if (hold := self.hold) is not None:
                        log.warning("step %d is held no longer, after %.0f s", step, hold.held_s)
                    return done
                pause(min(self._pauses_s[min(refusals, len(self._pauses_s) - 1)], left_s))
                refusals += 1
        finally:
            if self._hold is not None:
                self._hold = None
                self._tell(None)

    @contextlib.contextmanager
    def excusing(self, what: str) -> Iterator[None]:
        """Log a transient refusal, which is not raised: the next save repeats this work. `what` begins the log line."""
        try:
            yield
        except StorageError as error:
            if not error.transient or not self.grace_s:
                raise
            log.warning("%s: %s", what, error.message)

    def _held(self, error: StorageError, step: int) -> float:
        """Record a refusal; return the seconds for which the save may still be held."""
        before, reason, now_s = self.hold, error.transient, self._now()
        # If the last refusal is longer ago than the grace, it was an earlier outage. This does not apply within one
        # hold: one try may outlast the grace.
        if self._since_s is None or (before is None and now_s - self._refused_s > self.grace_s):
            self._since_s = now_s
        self._refused_s = now_s
        if before is None or before.reason != reason:
            self._hold = SaveHold(step=step, reason=reason, host=socket.gethostname())
            hold = self.hold
            assert hold is not None, "it was just set"
            self._tell(hold)
            log.warning(
                "%s: step %d is tried again, up to %g s, and %s: %s",
                no_checkpoint(hold, committed_step=self.committed_step),
                step,
                self.grace_s,
                self._meanwhile,
                error.message,
            )
        return self._since_s + self.grace_s - now_s

    def _give_up(self, error: StorageError) -> NoReturn:
        hold = self.hold
        assert hold is not None, "only what is held is given up"
        reason_text = no_checkpoint(hold, committed_step=self.committed_step)
        log.error("%s: step %d is not tried any longer: %s", reason_text, hold.step, error)
        if self.on_over is None:
            raise error
        self.on_over(reason_text)
        raise HoldOver(reason_text) from error


def first_taken(acts: Sequence[Callable[[], _T]]) -> _T:
    """Return the result of the first act that succeeds; skip transient errors only. If none does, raise the first."""
    refused: StorageError | None = None
    for act in acts:
        try:
            done = act()
        except StorageError as error:
            refused = refused or error
            if not error.transient:
                break
        else:
            if refused is not None:
                log.warning(
                    "the second storage takes the saves that the first one refuses: %s", refused.message
                )
            return done
    assert refused is not None, "there is an act, which returned or raised"
    try:
        raise refused
    finally:
        refused = (
            None  # its traceback would keep this frame, with the data of the try, alive until a collection
        )
