"""From a notice to a step that all ranks agree to save: `PreemptionPoint`.

Ranks hear of a notice at different moments, and one that saves alone waits for the others in vain.

1. Each rank asks about every step, in the same order. Before the notice the answer is no.
2. A rank that hears of the notice arrives at a barrier, in a thread of its own, with the last step it was
   told no about. From then on its training waits when it asks about the next one.
3. All have arrived: the point is behind the highest of those steps, which nobody has passed.

All of it belongs to one generation: in a newer one, which a standalone process may rejoin, it begins anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from strata.core.stop.last_step import BEGIN_BARRIER
from strata.errors import StrataError

BARRIER: Final = "strata.checkpoint.preemption"
MIN_WAIT_S: Final = 1.0

log: Final = logging.getLogger("strata.checkpoint")


@dataclass(slots=True)
class _Agreement:
    """What the ranks of one generation agree on, as far as this rank is."""

    generation: int
    last_no: int = -1
    begun: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    point: int | None = None
    """The highest step that any rank was told no about; None: there is no agreement."""


class PreemptionPoint:
    """One rank's part. It looks for notices from the first question on.

    `client` is what `strata.connect()` returned; one that tells nothing of worlds is never asked to
    stop. `storage_uri` tells the managers of a process apart.
    """

    def __init__(self, client: Any, *, storage_uri: str) -> None:
        self._client = client
        self._barrier = f"{BARRIER}.{hashlib.sha256(storage_uri.encode()).hexdigest()[:8]}"
        self._lock = threading.Lock()
        self._notice: Any = None
        """The newest notice that asks anybody to stop; it may be of a generation not rejoined yet."""
        self._agreement = _Agreement(0)
        self._stop: Callable[[], None] | None = None

    def reached(self, step: int) -> bool:
        """Tell whether `step` is behind the point; waits for the other ranks once a notice was heard."""
        self._look()
        with self._lock:
            agreement = self._current()
            if not agreement.begun:
                agreement.last_no = max(agreement.last_no, step)
                return False
        agreement.over.wait()
        return agreement.point is not None and step > agreement.point

    def close(self) -> None:
        """Look no more; harmless when repeated."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def _look(self) -> None:
        if self._stop is not None or not hasattr(self._client, "observe_world"):
            return
        self._client.heed_notices()
        self._stop = self._client.observe_world(self._hear)

    def _hear(self, update: Any) -> None:
        """Take note of the world as it is known; in the session's thread, which must not wait."""
        from strata.wire.worlds import notice_record  # noqa: PLC0415  # imports protobuf, which a manager alone needs not

        # before a world of another size nobody leaves, and whoever is told "yes" does
        if update.HasField("notice") and notice_record(update.notice).has_deadline:
            with self._lock:
                self._notice = update.notice
                self._current()

    def _current(self) -> _Agreement:
        """Return the agreement of the client's generation, begun if a notice asks for it; with the lock held."""
        generation, notice = self._client.generation, self._notice
        if self._agreement.generation != generation:
            self._agreement = _Agreement(generation)
            if self._stop is not None:
                threading.Thread(target=self._take_part, name="strata-begin", daemon=True).start()
        agreement = self._agreement
        if notice is not None and notice.generation == generation and not agreement.begun:
            agreement.begun = True
            log.warning("all ranks are asked to stop: %s", notice.reason)
            limit_s = max(MIN_WAIT_S, notice.grace_ms / 1000)
            threading.Thread(
                target=self._agree, args=(agreement, limit_s), name="strata-preemption", daemon=True
            ).start()
        return agreement

    def _take_part(self) -> None:
        """Let the leader know that these ranks save when they are asked to stop: it ends others at once."""
        with contextlib.suppress(StrataError):
            if not self._client.has_met(BEGIN_BARRIER):  # `strata.init` has, if this process uses it
                self._client.barrier(BEGIN_BARRIER)

    def _agree(self, agreement: _Agreement, limit_s: float) -> None:
        name = f"{self._barrier}.{agreement.generation}"  # who comes too late meets nobody of the next one
        try:
            said = self._client.barrier(name, str(agreement.last_no).encode(), timeout_s=limit_s)
            agreement.point = max(map(int, said.values()))
        except StrataError as error:
            log.warning("the ranks agree on no step to save before they stop: %s", error)
        finally:
            agreement.over.set()
