"""Reads a page's resources once a second in a separate thread, so that keys never wait for a coordinator."""

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
"""Resources that change slowly are read at every `RARELY`-th reading only."""
MOST_JOBS: Final = 200
AGAIN_MS: Final = 5000
"""How much history is read again at each reading, because its newest values still change."""

Read = Callable[[str], Any]


class Client(Protocol):
    """The part of `CoordinatorClient` that a reader needs."""

    def resource(self, path: str) -> Any:
        """Return a resource, or raise a `StrataError`."""
        ...


FIRST_S: Final = 180.0
"""How much history to request at first: more than a line of a terminal shows."""


def look(
    read: Read,
    job: str | None,
    before: Seen | None = None,
    *,
    rank: int | None = None,
    all_of_it: bool = True,
) -> Seen:
    """Return the current content of a page: that of `job`, of the job's `rank`, or the list of jobs."""
    same = before if before is not None and before.job == job else None
    at_s = time.monotonic()
    if job is None:
        jobs, total = _jobs(read)
        cluster = _allowed(read, "/cluster") if all_of_it or same is None else same.cluster
        return Seen(at_s=at_s, cluster=cluster, jobs=jobs, total=total)
    root = f"/jobs/{quote(job, safe='')}"
    if rank is not None:
        one = read(f"{root}/ranks/{rank}")
        return replace(same or Seen(at_s=at_s, job=job), at_s=at_s, rank=rank, one=one, read=True, error="")
    rarely = all_of_it or same is None or same.detail is None
    not_shown: dict[str, str] = {}
    detail = read(root)

    def part(name: str, path: str = "") -> Any:
        """Return a part of the page; None if it is too large for an answer. The other parts are not affected."""
        if same is not None and name in same.not_shown and not rarely:
            not_shown[name] = same.not_shown[
                name
            ]  # a part that was too large is requested again, but not every second
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
    """Return a resource; None if the caller may not read it."""
    try:
        return read(path)
    except PermissionDenied:
        return None


def _history_since(same: Seen | None) -> int:
    """Return the time from which to request history: the whole history of many series would be too large for an
    answer.
    """
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
    """Reads the page that `show` named last, once a second; after each read its thread calls `on_news`."""

    def __init__(self, client: Client, first: Seen, *, on_news: Callable[[], None]) -> None:
        self._client = client
        self._on_news = on_news
        self._seen = first
        self._requested = (first.job, first.rank)
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Stop reading, without waiting for a read in progress."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def show(self, job: str | None, rank: int | None = None) -> None:
        """Read another page from now on, the first time immediately."""
        with self._changed:
            self._requested = (job, rank)
            self._changed.notify_all()

    @property
    def seen(self) -> Seen:
        """The newest content."""
        with self._changed:
            return self._seen

    def _run(self) -> None:
        count = 0
        page = (self._seen.job, self._seen.rank)
        while self._wait(page):
            page, count = self._requested, count + 1
            before, (job, rank) = self._seen, page
            try:
                seen = look(self._client.resource, job, before, rank=rank, all_of_it=count % RARELY == 0)
            except StrataError as error:
                if before.job == job:
                    one = before.one if before.rank == rank else None
                    seen = replace(before, rank=rank, one=one, error=error.message)
                else:
                    seen = _nothing(job, error)
            with self._changed:
                self._seen = seen
            self._on_news()

    def _wait(self, page: tuple[str | None, int | None]) -> bool:
        """Wait a second, or until another page is requested; return False after `end`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._requested != page, EVERY_S)
            return not self._ended


def _nothing(job: str | None, error: StrataError) -> Seen:
    return Seen(at_s=time.monotonic(), job=job, read=False, error=error.message)
