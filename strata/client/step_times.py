"""What its steps cost a rank, as the message that carries it upward."""

from __future__ import annotations

from strata.core.stragglers import StepTimes
from strata.v1 import members_pb2


def step_times_message(times: StepTimes | None) -> members_pb2.StepTimes:
    """Return the message of what a rank measured; an empty one before it made enough steps."""
    if times is None:
        return members_pb2.StepTimes()
    return members_pb2.StepTimes(
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
