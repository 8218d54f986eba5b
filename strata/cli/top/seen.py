"""What was read of a cluster, for one page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Resource = Mapping[str, Any]
"""A resource of the HTTP API, as `json.loads` gives it: its fields are those of `strata.dashboard.api.model`."""

KEPT: Final = 600
"""Values of a series that are kept: ten minutes of one a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The newest that was read. What could not be read is as it was the time before."""

    at_s: float
    """When all of it was read last, by the reader's clock."""
    job: str | None = None
    """The job that it is about; None: all of them."""
    rank: int | None = None
    """The rank of the job that it is about; None: all of them."""
    one: Resource | None = None
    """What was read of that rank."""
    cluster: Resource | None = None
    jobs: tuple[Resource, ...] = ()
    total: int = 0
    detail: Resource | None = None
    ranks: Resource | None = None
    barriers: Resource | None = None
    checkpoints: Resource | None = None
    generations: Resource | None = None
    history: Resource | None = None
    not_shown: Mapping[str, str] = field(default_factory=dict)
    """Why a part of the page is not there: by its name, for parts that do not fit into an answer."""
    read: bool = True
    """Whether anything was ever read of it."""
    trouble: str = ""
    """Why nothing newer was read."""

    def as_json(self) -> dict[str, object]:
        """Return the resources by their names."""
        if self.job is None:
            return {"cluster": self.cluster, "jobs": list(self.jobs), "total": self.total}
        return {
            "job": self.detail,
            "ranks": self.ranks,
            "barriers": self.barriers,
            "checkpoints": self.checkpoints,
            "generations": self.generations,
            "history": self.history,
            **({"not_shown": dict(self.not_shown)} if self.not_shown else {}),
        }


def merged(old: Resource | None, new: Resource) -> Resource:
    """Return the history with `new` in place of what it covers, the last `KEPT` values of it."""
    interval = new["interval_ms"]
    if old is None or not old["series"] or old["interval_ms"] != interval or not new["series"]:
        return new if new["series"] or old is None else old
    begin = old["from_unix_ms"]
    at = (new["from_unix_ms"] - begin) // interval
    size = at + max(len(each["values"]) for each in new["series"].values())
    if at < 0 or at > KEPT + max(len(each["values"]) for each in old["series"].values()):
        return new
    series = {}
    for name in {**old["series"], **new["series"]}:
        before = list(old["series"].get(name, {"values": ()})["values"])[:at]
        before += [None] * (at - len(before))
        fresh = list(new["series"].get(name, {"values": ()})["values"])
        values = before + fresh + [None] * (size - at - len(fresh))
        unit = (new["series"].get(name) or old["series"][name])["unit"]
        series[name] = {"unit": unit, "values": values[-KEPT:]}
    return {"from_unix_ms": begin + interval * max(0, size - KEPT), "interval_ms": interval, "series": series}
