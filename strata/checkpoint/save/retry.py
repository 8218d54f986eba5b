"""A save is held, not lost, while the storage refuses it for a reason that time may heal: `SaveRetry`.

    a part is refused ─▶ held ─▶ tried again after 1, 2, 4 … 30 s ─▶ taken: the save goes on
                           │                                     └─▶ `grace_s` over: the hold ends without it
                           └─▶ the attempt is given up or cancelled: the hold ends with it

The grace is one for all that is refused, of any object and of any save, until a checkpoint is committed: a storage
that takes one object of ten saves nothing.

A try begins its object from the start, from the snapshot that the save has already. Of a storage with two
tiers each try offers the object to the near one, and then to the far one: reading takes each object from
whichever has it. All of it happens in the writer's thread; what is held is read from any.
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
"""How long a rank tries to save again, unless it was told otherwise."""
PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""How long to wait after each refusal in a row; the last one from then on."""

_T = TypeVar("_T")

log: Final = logging.getLogger("strata.checkpoint")


class HoldOver(CheckpointAborted):
    """A held save ended without a checkpoint, and what follows from that is under way: no failure of its own."""


class SaveRetry:
    """The holds of one rank's saves, one after the other.

    `grace_s` after the first refusal since the newest commit nothing is held any longer; 0: nothing ever is. `tell` is
    told of each hold, and None at its end.
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
        """`meanwhile` is what the log says of who tries again."""
        self.grace_s = grace_s
        self._meanwhile = meanwhile
        self.on_over: Callable[[str], None] | None = None
        """Told why nothing could be saved when the grace of a hold is over. Without it that is the save's error."""
        self.committed_step: int | None = None
        """The step of the newest checkpoint that this rank knows of."""
        self._tell = tell
        self._now = now
        self._pauses_s = pauses_s
        self._hold: SaveHold | None = None
        self._since_s: float | None = None
        """When the first refusal was since the newest commit."""
        self._refused_s = 0.0
        """When the last one was."""

    @property
    def hold(self) -> SaveHold | None:
        """Why nothing can be saved at this moment; None while that is not known."""
        hold, since_s = self._hold, self._since_s
        return hold if hold is None or since_s is None else replace(hold, held_s=self._now() - since_s)

    def committed(self, step: int) -> None:
        """Take note of a checkpoint: what is refused from now on is refused anew."""
        self.committed_step, self._since_s = step, None

    def first(self, acts: Sequence[Callable[[], _T]], *, step: int, pause: Callable[[float], None]) -> _T:
        """Return what the first of `acts` returns that the storage takes; they are tried until one is taken.

        `pause` waits so many seconds, and raises when the save is not wanted any more.
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
        """Log what the storage refuses for a while of work that the next save does as well; `what` follows."""
        try:
            yield
        except StorageError as error:
            if not error.transient or not self.grace_s:
                raise
            log.warning("%s: %s", what, error.message)

    def _held(self, error: StorageError, step: int) -> float:
        """Take note of a refusal; return for how long the save may be held yet."""
        before, reason, now_s = self.hold, error.transient, self._now()
        # a refusal long before this hold began was another outage; a try within one may take longer than the grace
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
        told = no_checkpoint(hold, committed_step=self.committed_step)
        log.error("%s: step %d is not tried any longer: %s", told, hold.step, error)
        if self.on_over is None:
            raise error
        self.on_over(told)
        raise HoldOver(told) from error


def first_taken(acts: Sequence[Callable[[], _T]]) -> _T:
    """Return what the first act returns that succeeds; raise what refused the first one, if time may heal it."""
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
                log.warning("the second storage takes what the first one refuses: %s", refused.message)
            return done
    assert refused is not None, "there is an act, which returned or raised"
    try:
        raise refused
    finally:
        refused = (
            None  # its traceback would keep this frame, and with it what a try has read, until a collection
        )
