"""From a stop notice to a step that all ranks agree to save: `PreemptionPoint`.

Ranks receive a notice at different moments. A save needs all ranks, so they must agree on its step.

1. Each rank calls `reached` for every step, in the same order. Before the notice it returns False.
2. A rank that receives the notice arrives at a barrier, in a thread of its own, with the last step for which
   `reached` returned False. From then on its training waits in the next call of `reached`.
3. When all have arrived, the agreed point is the highest of those steps. No rank has passed it.

An agreement belongs to one generation. If a standalone process rejoins a newer generation, it begins a new
agreement.
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
    """The agreement of one generation's ranks, as far as this rank knows it."""

    generation: int
    last_no: int = -1
    begun: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    point: int | None = None
    """The highest step for which any rank's `reached` returned False; None without an agreement."""


class PreemptionPoint:
    """One rank's part in the agreement. From the first call of `reached` on, it watches for notices.

    `client` is the result of `strata.connect()`; a client that does not report worlds receives no notice.
    `storage_uri` distinguishes the managers of one process.
    """

    def __init__(self, client: Any, *, storage_uri: str) -> None:
        self._client = client
        self._barrier = f"{BARRIER}.{hashlib.sha256(storage_uri.encode()).hexdigest()[:8]}"
        self._lock = threading.Lock()
        self._notice: Any = None
        """The newest notice that requests a stop; it may belong to a generation not rejoined yet."""
        self._agreement = _Agreement(0)
        self._stop: Callable[[], None] | None = None

    def reached(self, step: int) -> bool:
        """Return whether `step` is greater than the agreed point; once a notice came, wait for the other ranks."""
        self._observe()
        with self._lock:
            agreement = self._current()
            if not agreement.begun:
                agreement.last_no = max(agreement.last_no, step)
                return False
        agreement.over.wait()
        return agreement.point is not None and step > agreement.point

    def close(self) -> None:
        """Stop watching. Idempotent."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def _observe(self) -> None:
        if self._stop is not None or not hasattr(self._client, "observe_world"):
            return
        self._client.support_graceful_stop()
        self._stop = self._client.observe_world(self._on_world)

    def _on_world(self, update: Any) -> None:
        """Record the newest notice; called in the session's thread, so it must not wait."""
        from strata.wire.worlds import notice_record  # noqa: PLC0415  # imports protobuf, which few managers need

        # a notice without a deadline announces a world of another size: no rank stops because of it, so
        # `reached` must not return True
        if update.HasField("notice") and notice_record(update.notice).has_deadline:
            with self._lock:
                self._notice = update.notice
                self._current()

    def _current(self) -> _Agreement:
        """Return the agreement of the client's generation, and begin it if a notice requests a stop; the caller must
        hold the lock.
        """
        generation, notice = self._client.generation, self._notice
        if self._agreement.generation != generation:
            self._agreement = _Agreement(generation)
            if self._stop is not None:
                threading.Thread(target=self._meet_to_begin, name="strata-begin", daemon=True).start()
        agreement = self._agreement
        if notice is not None and notice.generation == generation and not agreement.begun:
            agreement.begun = True
            log.warning("all ranks are requested to stop: %s", notice.reason)
            limit_s = max(MIN_WAIT_S, notice.grace_ms / 1000)
            threading.Thread(
                target=self._agree, args=(agreement, limit_s), name="strata-preemption", daemon=True
            ).start()
        return agreement

    def _meet_to_begin(self) -> None:
        """Show the leader that these ranks save before they stop: the leader immediately stops ranks that have not
        met here.
        """
        with contextlib.suppress(StrataError):
            if not self._client.has_met(BEGIN_BARRIER):  # `strata.init` may have met already
                self._client.barrier(BEGIN_BARRIER)

    def _agree(self, agreement: _Agreement, limit_s: float) -> None:
        name = f"{self._barrier}.{agreement.generation}"  # so that late ranks do not meet ranks of the next generation
        try:
            last_steps = self._client.barrier(name, str(agreement.last_no).encode(), timeout_s=limit_s)
            agreement.point = max(map(int, last_steps.values()))
        except StrataError as error:
            log.warning("the ranks agree on no step to save before they stop: %s", error)
        finally:
            agreement.over.set()
