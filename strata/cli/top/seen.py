"""The content of one page of `strata top`, as it was read from a coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Resource = Mapping[str, Any]
"""A resource of the HTTP API, parsed by `json.loads`, with the fields of `strata.dashboard.api.model`."""

KEPT: Final = 600
"""How many values of a series are kept: one a second for ten minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The newest content of a page. If a part cannot be read, its earlier content stays."""

    at_s: float
    """When the page was last read, on the reader's clock."""
    job: str | None = None
    """The job of the page; None: all jobs."""
    rank: int | None = None
    """The rank of the page; None: all ranks of the job."""
    one: Resource | None = None
    """The resource of that rank."""
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
    """The parts of the page that are too large for an answer, by name, each with its error."""
    read: bool = True
    """Whether the page was ever read."""
    error: str = ""
    """The error of the last read, if it failed."""

    def as_json(self) -> dict[str, object]:
        """Return the resources by name."""
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
    """Return the last `KEPT` values of the joined history: `old` before the first time of `new`, then `new`."""
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
