"""From a notice to a step that all ranks agree to save: `PreemptionPoint`.

Ranks hear of a notice at different moments, and one that saves alone waits for the others in vain.

1. Each rank asks about every step, in the same order. Before the notice the answer is no.
2. A rank that hears of the notice arrives at a barrier, in a thread of its own, with the last step it was
   told no about. From then on its training waits when it asks about the next one.
3. All have arrived: the point is behind the highest of those steps, which nobody has passed.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from strata.errors import StrataError

BARRIER: Final = "strata.checkpoint.preemption"
MIN_WAIT_S: Final = 1.0

log: Final = logging.getLogger("strata.checkpoint")


class PreemptionPoint:
    """One rank's part. It looks for notices from the first question on.

    `client` is what `strata.connect()` returned; one that tells nothing of worlds is never asked to
    stop. `storage_uri` tells the managers of a process apart.
    """

    def __init__(self, client: Any, *, storage_uri: str) -> None:
        self._client = client
        self._barrier = f"{BARRIER}.{hashlib.sha256(storage_uri.encode()).hexdigest()[:8]}"
        self._lock = threading.Lock()
        self._last_no = -1
        self._agreeing = False
        self._agreed = threading.Event()
        self._point: int | None = None
        """The highest step that any rank was told no about; None: there is no agreement."""
        self._stop: Callable[[], None] | None = None

    def reached(self, step: int) -> bool:
        """Tell whether `step` is behind the point; waits for the other ranks once a notice was heard."""
        self._look()
        with self._lock:
            if not self._agreeing:
                self._last_no = max(self._last_no, step)
                return False
        self._agreed.wait()
        return self._point is not None and step > self._point

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
        from strata.v1.worlds_pb2 import STOP_ACTION_RESHAPE  # noqa: PLC0415  # imports protobuf

        notice = update.notice if update.HasField("notice") else None
        if notice is None or notice.generation != self._client.generation:
            return
        if notice.action == STOP_ACTION_RESHAPE:  # nobody stops
            return
        with self._lock:
            if self._agreeing:
                return
            self._agreeing = True
        log.warning("all ranks are asked to stop: %s", notice.reason)
        limit_s = max(MIN_WAIT_S, notice.grace_ms / 1000)
        threading.Thread(target=self._agree, args=(limit_s,), name="strata-preemption", daemon=True).start()

    def _agree(self, limit_s: float) -> None:
        try:
            said = self._client.barrier(self._barrier, str(self._last_no).encode(), timeout_s=limit_s)
            self._point = max(map(int, said.values()))
        except StrataError as error:
            log.warning("the ranks agree on no step to save before they stop: %s", error)
        finally:
            self._agreed.set()
