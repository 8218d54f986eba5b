"""Time series of a job, for charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from strata.coordinator.reports.charts import series_unit
from strata.core.health.history import INTERVALS
from strata.dashboard.api import model
from strata.dashboard.source import Source
from strata.errors import InvalidArgument

DEFAULT_MS: Final = 1000 * min(INTERVALS)


def history(
    source: Source, name: str, *, interval_ms: int = DEFAULT_MS, since_unix_ms: int = 0
) -> model.History:
    """Return a job's series from `since_unix_ms` on; raise `InvalidArgument` if the interval is not recorded."""
    kept = [1000 * interval_s for interval_s in INTERVALS]
    if interval_ms not in kept:
        raise InvalidArgument(
            f"interval_ms is {interval_ms}", hint=f"it is one of {', '.join(map(str, kept))}"
        )
    charts = source.charts.job(name)
    if charts is None:
        return model.History(from_unix_ms=since_unix_ms, interval_ms=interval_ms, series={})
    found = charts.history.excerpt(interval_ms // 1000, -(-since_unix_ms // 1000), int(source.unix_now()))
    return model.History(
        from_unix_ms=1000 * found.from_unix_s,
        interval_ms=interval_ms,
        series={
            each: model.Series(unit=series_unit(each), values=_shown(values))
            for each, values in sorted(found.series.items())
        },
    )


def _shown(values: Sequence[float]) -> tuple[float | None, ...]:
    """Return values for sending: with the six digits that are recorded, and None for NaN."""
    return tuple(None if math.isnan(value) else float(f"{value:.6g}") for value in values)
