"""A rank's step reports, on the way from its trainer's thread to its session: `ProgressReports`.

    trainer's thread   add ─▶ queue ◀─ add ◀─ add …
    loop               ─────────▶ send, at most every `GATHERED_S` ─▶ session

A step costs the trainer's thread one clock reading and one queue entry. The first report after a pause wakes the
loop; this wake-up is the most expensive part. While the loop has a timer running, no report wakes the loop. Each
step enters the rank's window with the time at which it was reported. Only the newest report becomes a message.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Final

from strata.client.event_loop import BackgroundLoop
from strata.client.rank.shared_session import RankPlace, SharedSession
from strata.core.health.stragglers import StepTimes
from strata.observe import get_logger
from strata.v1.members_pb2 import RankProgress, TrainingReport
from strata.v1.members_pb2 import StepTimes as StepTimesMessage

log = get_logger()

GATHERED_S: Final = 0.2
"""Seconds between two messages. Short enough: charts have one point a second, and a rank is late after two seconds."""
MOST_REPORTED: Final = 1024

MakeTraining = Callable[[], TrainingReport]
"""Returns the state of the training at the moment of a report; called in the loop."""


_Report = tuple[RankPlace, float, int, str, float, float, MakeTraining | None]
"""(place, time, step, phase, compute time plus data wait, data wait, training); a plain tuple is the fastest to
make.
"""


class ProgressReports:
    """The reports of one client of a shared session. Any thread may call `add`; only the loop calls the rest."""

    def __init__(self, shared_session: SharedSession, background: BackgroundLoop) -> None:
        self._shared_session = shared_session
        self._loop = background
        self._now_s = background.now_s
        self._reported: collections.deque[_Report] = collections.deque(maxlen=MOST_REPORTED)
        self._awake = False
        """Whether the loop will read the queue without being woken up."""
        self._timer: asyncio.TimerHandle | None = None

    def add(
        self, step: int, phase: str, own_s: float, data_wait_s: float, training: MakeTraining | None
    ) -> None:
        """Queue a report; it is sent soon unless a newer one follows it."""
        self._reported.append(
            (self._shared_session.place, self._now_s(), step, phase, own_s, data_wait_s, training)
        )
        if not self._awake:
            self._awake = True
            self._loop.soon(self.send)

    def send(self) -> None:
        """Send the newest report with the times of all queued steps; read the queue again after `GATHERED_S`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._reported:
            self._awake = False
        if self._reported:  # also if the trainer's thread added a report just before `_awake` became False
            self._awake = True
            self._timer = asyncio.get_running_loop().call_later(GATHERED_S, self.send)
            if (newest := self._drain()) is not None:
                self._send(newest)

    def send_again(self) -> None:
        """Send the last message again with the current save hold, if there is a hold."""
        shared_session = self._shared_session
        again = RankProgress(
            rank=shared_session.place.rank, supports_graceful_stop=shared_session.supports_graceful_stop
        )
        if shared_session.last_report is not None:
            again.CopyFrom(shared_session.last_report)
            again.ClearField("save_hold")
        self._transmit(again)

    def _drain(self) -> _Report | None:
        """Empty the queue, note the time of each step, and return the newest report of this generation, or None."""
        queue, place, note, newest = (
            self._reported,
            self._shared_session.place,
            self._shared_session.steps.note,
            None,
        )
        while queue:
            report = queue.popleft()
            of, at_s, step, _, own_s, data_wait_s, _ = report
            if of is place:
                newest = report
                note(step, own_s - data_wait_s, data_wait_s, at_s)
        return newest

    def _send(self, report: _Report) -> None:
        """Send a report with the current time. Replicas order a rank's messages by this time, because a step and
        the phase after it may be reported within the time that one message takes.
        """
        shared_session = self._shared_session
        place, _, step, phase, own_s, _, training = report
        progress = RankProgress(
            rank=place.rank,
            step=step,
            phase=phase,
            supports_graceful_stop=shared_session.supports_graceful_stop,
            step_us=round(1e6 * own_s),
            training=_training_report(training),
            # empty while the rank warms up, so that no reader takes warm-up times for the rank's pace
            step_times=_step_times(shared_session.steps.times) if own_s > 0 else None,
        )
        self._transmit(progress)

    def _transmit(self, progress: RankProgress) -> None:
        """Send a rank's step and phase, with the save hold if there is one."""
        shared_session = self._shared_session
        if shared_session.save_hold is not None:
            progress.save_hold.CopyFrom(shared_session.save_hold.message())
        shared_session.last_report = progress
        shared_session.session.progress(shared_session.place.generation, [progress])


def _training_report(training: MakeTraining | None) -> TrainingReport | None:
    """Return the training's state, or None if the program's function fails: the step still counts."""
    if training is None:
        return None
    try:
        return training()
    except Exception:
        log.exception("training_report_failed")
        return None


def _step_times(times: StepTimes | None) -> StepTimesMessage:
    """Return the message of a rank's step times; an empty one before there are enough steps."""
    if times is None:
        return StepTimesMessage()
    return StepTimesMessage(
        compute_us=_us(times.compute_s),
        data_wait_us=_us(times.data_wait_s),
        median_compute_us=_us(times.median_compute_s),
        median_data_wait_us=_us(times.median_data_wait_s),
        best_compute_us=_us(times.best_compute_s),
        cheaper_us=_us(times.cheaper_s),
        steady_steps=times.steady_steps,
        slowed_ms=max(1, round(times.slowed_s * 1000)) if times.slowed_s > 0 else 0,
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
