"""Reads what a page shows, again and again, in a thread of its own: the keyboard waits for no coordinator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Protocol
from urllib.parse import quote

from strata.cli.top.seen import Seen, merged
from strata.errors import PermissionDenied, QuotaExceeded, StrataError

EVERY_S: Final = 1.0
RARELY: Final = 5
"""What changes slowly is read every so many times."""
MOST_JOBS: Final = 200
AGAIN_MS: Final = 5000
"""How much of the history is read again: the newest values still change."""

Read = Callable[[str], Any]


class Client(Protocol):
    """What this needs of a `CoordinatorClient`."""

    def resource(self, path: str) -> Any:
        """Return a resource, or raise a `StrataError`."""
        ...


FIRST_S: Final = 180.0
"""So much history is asked for at first: more than a line of a terminal shows."""


def look(
    read: Read,
    job: str | None,
    before: Seen | None = None,
    *,
    rank: int | None = None,
    all_of_it: bool = True,
) -> Seen:
    """Return what the page of `job`, of one `rank` of it, or the list of jobs, shows now."""
    same = before if before is not None and before.job == job else None
    at_s = time.monotonic()
    if job is None:
        jobs, total = _jobs(read)
        cluster = _allowed(read, "/cluster") if all_of_it or same is None else same.cluster
        return Seen(at_s=at_s, cluster=cluster, jobs=jobs, total=total)
    root = f"/jobs/{quote(job, safe='')}"
    if rank is not None:
        one = read(f"{root}/ranks/{rank}")
        return replace(same or Seen(at_s=at_s, job=job), at_s=at_s, rank=rank, one=one, read=True, trouble="")
    rarely = all_of_it or same is None or same.detail is None
    not_shown: dict[str, str] = {}
    detail = read(root)

    def part(name: str, path: str = "") -> Any:
        """Return a part of the page; one that does not fit into an answer costs that part, not the page."""
        if same is not None and name in same.not_shown and not rarely:
            not_shown[name] = same.not_shown[name]  # it is asked for again, but not every second
            return None
        try:
            return read(path or f"{root}/{name}")
        except QuotaExceeded as error:
            not_shown[name] = error.message
            return None

    ranks, barriers = part("ranks"), part("barriers")
    news = part("history", f"{root}/history?since_unix_ms={_history_since(same)}")
    seen = Seen(
        at_s=at_s,
        job=job,
        detail=detail,
        ranks=ranks,
        barriers=barriers,
        history=_with_history(same, news),
        not_shown=not_shown,
    )
    if rarely:
        return replace(
            seen,
            checkpoints=part("checkpoints"),
            generations=part("generations"),
            cluster=_allowed(read, "/cluster"),
        )
    assert same is not None
    for name in ("checkpoints", "generations"):
        if name in same.not_shown:
            not_shown[name] = same.not_shown[name]
    return replace(seen, checkpoints=same.checkpoints, generations=same.generations, cluster=same.cluster)


def _jobs(read: Read) -> tuple[tuple[Any, ...], int]:
    found: list[Any] = []
    token = ""
    while True:
        page = read(f"/jobs?page_token={quote(token, safe='')}" if token else "/jobs")
        found += page["jobs"]
        token = page["next_page_token"]
        if not token or len(found) >= MOST_JOBS:
            return tuple(found), page["total"]


def _allowed(read: Read, path: str) -> Any:
    """Return a resource; None if it is not for this caller."""
    try:
        return read(path)
    except PermissionDenied:
        return None


def _history_since(same: Seen | None) -> int:
    """Return from when on to ask for the history: all of a job with many series is more than fits into an answer."""
    known = same.history if same is not None else None
    if known is None or not known["series"]:
        return int(1000 * (time.time() - FIRST_S))
    count = max(len(each["values"]) for each in known["series"].values())
    return max(0, int(known["from_unix_ms"] + count * known["interval_ms"] - AGAIN_MS))


def _with_history(same: Seen | None, news: Any) -> Any:
    known = same.history if same is not None else None
    if news is None:
        return known
    return merged(known, news) if known is not None and known["series"] else news


class Reader:
    """Reads once a second what `show` names last, and calls `on_news` from its thread when there is more to show."""

    def __init__(self, client: Client, first: Seen, *, on_news: Callable[[], None]) -> None:
        self._client = client
        self._on_news = on_news
        self._seen = first
        self._wanted = (first.job, first.rank)
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Read no more. A read that goes on is not waited for."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def show(self, job: str | None, rank: int | None = None) -> None:
        """Read another page from now on, at once."""
        with self._changed:
            self._wanted = (job, rank)
            self._changed.notify_all()

    @property
    def seen(self) -> Seen:
        """The newest that was read."""
        with self._changed:
            return self._seen

    def _run(self) -> None:
        count = 0
        page = (self._seen.job, self._seen.rank)
        while self._wait(page):
            page, count = self._wanted, count + 1
            before, (job, rank) = self._seen, page
            try:
                seen = look(self._client.resource, job, before, rank=rank, all_of_it=count % RARELY == 0)
            except StrataError as error:
                if before.job == job:
                    one = before.one if before.rank == rank else None
                    seen = replace(before, rank=rank, one=one, trouble=error.message)
                else:
                    seen = _nothing(job, error)
            with self._changed:
                self._seen = seen
            self._on_news()

    def _wait(self, page: tuple[str | None, int | None]) -> bool:
        """Return after a second, or as soon as another page is wanted; False once it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._wanted != page, EVERY_S)
            return not self._ended


def _nothing(job: str | None, error: StrataError) -> Seen:
    return Seen(at_s=time.monotonic(), job=job, read=False, trouble=error.message)
