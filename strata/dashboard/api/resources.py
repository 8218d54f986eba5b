"""The resources of the API: from a path below `/api/v1` to a JSON body, for requests and for the stream."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from strata.coordinator.context import ReadResource
from strata.core.access.authority import Identity, refusal
from strata.core.job import job_names
from strata.dashboard.api import model
from strata.dashboard.api.barriers import barriers
from strata.dashboard.api.cluster import cluster, jobs
from strata.dashboard.api.history import DEFAULT_MS, history
from strata.dashboard.api.job import events, generations, job
from strata.dashboard.api.ranks import devices, heatmap, rank, ranks
from strata.dashboard.api.saves import checkpoints, datasets
from strata.dashboard.source import Source
from strata.errors import (
    CheckpointNotFound,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    Refused,
    StrataError,
    Unauthenticated,
)
from strata.observe.words import printable

FRESH_S: Final = 1.0
"""How long a body is cached: a body is made at most once a second, however many clients watch the resource."""
MAX_KEPT: Final = 256
MAX_PATH_CHARS: Final = 1024

PARAMETERS: Final = (
    "phase",
    "q",
    "page_token",
    "after_revision",
    "interval_ms",
    "since_unix_ms",
)

Make = Callable[[], object | Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource that a path names. `job`: the job that it describes; None for the cluster as a whole."""

    path: str
    job: str | None
    make: Make
    threaded: bool = False
    """Whether `make` takes so long that it must run in a thread, not in the event loop."""
    per_caller: frozenset[str] = frozenset()
    """The jobs that the caller is limited to; empty unless the body depends on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A resource as JSON, as of a revision of the view and a second of the wall clock."""

    json: bytes
    revision: int
    unix_s: int


class Resources:
    """The resources of one replica, with their cached bodies."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._bodies: dict[tuple[str, frozenset[str]], tuple[float, Body]] = {}
        self._making = asyncio.Lock()

    def find(self, path: str, limited_to: frozenset[str] = frozenset()) -> Resource:
        """Return the resource that `path` and its query name; raise `NotFound` or `InvalidArgument` if there is none.

        `limited_to` are the jobs that the caller may read; empty: all jobs.
        """
        try:
            split = urllib.parse.urlsplit(path[:MAX_PATH_CHARS])
        except ValueError as error:
            raise InvalidArgument(f"{printable(path)[:80]!r} is no path: {error}") from None
        query = {key: values[-1] for key, values in urllib.parse.parse_qs(split.query).items()}
        parts = [urllib.parse.unquote(part) for part in split.path.strip("/").split("/")]
        source = self._source
        match parts:
            case ["cluster"]:
                return Resource(path=path, job=None, make=self._cluster)
            case ["jobs"]:
                phase, text, token = (query.get(name, "") for name in ("phase", "q", "page_token"))
                return Resource(
                    path=path,
                    job=None,
                    make=lambda: jobs(
                        source, phase=phase, text=text, page_token=token, limited_to=limited_to
                    ),
                    per_caller=limited_to,
                )
            case ["events"]:
                after = _whole(query, "after_revision", 0)
                return Resource(
                    path=path,
                    job=None,
                    make=lambda: events(source, None, after=after, limited_to=limited_to),
                    per_caller=limited_to,
                )
            case ["jobs", name, *rest]:
                found = _of_job(source, name, rest, query)
                if found is not None:
                    make = self._existing(name, found)
                    return Resource(path=path, job=name, make=make, threaded=rest == ["history"])
            case _:
                pass
        raise NotFound(f"there is no {printable(split.path)[:200]}", hint="openapi.json lists the paths")

    async def body(self, resource: Resource) -> Body:
        """Return a resource as JSON, at most a second old; raise the errors of `make`."""
        key = (canonical(resource.path), resource.per_caller)
        async with self._making:  # concurrent requests wait for the body that the first one makes
            now_s = asyncio.get_running_loop().time()
            held = self._bodies.get(key)
            if (
                held is not None and now_s - held[0] < FRESH_S * 0.9
            ):  # 0.9: a client whose timer fires a little early still gets a new body
                return held[1]
            await asyncio.sleep(0)  # lets the loop serve barriers and heartbeats between two bodies
            revision, unix_s = self._source.view.revision, int(self._source.unix_now())
            if resource.threaded:
                json = await in_thread(lambda: msgspec.json.encode(resource.make()))
            else:
                made: Any = resource.make()
                json = msgspec.json.encode(await made if isinstance(made, Awaitable) else made)
            body = Body(json=json, revision=revision, unix_s=unix_s)
            self._bodies = {key: held for key, held in self._bodies.items() if now_s - held[0] < FRESH_S}
            if len(self._bodies) < MAX_KEPT:
                self._bodies[key] = (now_s, body)
        return body

    def reader(self, cluster: str) -> ReadResource:
        """Return a function that returns a resource's JSON if the identity may read the resource."""

        async def read(path: str, identity: Identity | None) -> bytes:
            found = self.find(path, identity.jobs if identity is not None else frozenset())
            method = "Admin.GetStatus" if found.job is None else "Worlds.GetJob"
            refused = refusal(identity, method, cluster=cluster, job=found.job)
            if refused is not None:
                raise refused
            return (await self.body(found)).json

        return read

    async def _cluster(self) -> model.Cluster:
        return cluster(self._source, self._source.etcd_members())

    def _existing(self, name: str, make: Callable[[], object | None]) -> Make:
        """Return a function that makes a job's resource, or raises `NotFound` if the job or part does not exist."""

        def made() -> object:
            if name not in job_names(self._source.view, self._source.keys):
                raise NotFound(
                    f"no job {printable(name)[:128]} exists", hint="a job begins with its first member"
                )
            found = make()
            if found is None:
                raise NotFound(f"job {name} has nothing of that name")
            return found

        return made


def _of_job(
    source: Source, name: str, rest: list[str], query: Mapping[str, str]
) -> Callable[[], object | None] | None:
    """Return the function that makes a part of a job; None if there is no such part."""
    token, since = query.get("page_token", ""), _whole(query, "since_unix_ms", 0)
    interval, after = _whole(query, "interval_ms", DEFAULT_MS), _whole(query, "after_revision", 0)
    match rest:
        case []:
            return lambda: job(source, name)
        case ["ranks"]:
            return lambda: ranks(source, name)
        case ["ranks", number]:
            rank_number = _number("rank", number)
            return lambda: rank(source, name, rank_number)
        case ["devices"]:
            return lambda: devices(source, name)
        case ["heatmap"]:
            return lambda: heatmap(source, name, since_unix_ms=since)
        case ["history"]:
            return lambda: history(source, name, interval_ms=interval, since_unix_ms=since)
        case ["barriers"]:
            return lambda: barriers(source, name)
        case ["datasets"]:
            return lambda: datasets(source, name)
        case ["checkpoints"]:
            return lambda: checkpoints(source, name, page_token=token)
        case ["generations"]:
            return lambda: generations(source, name)
        case ["events"]:
            return lambda: events(source, name, after=after)
        case _:
            return None


async def in_thread(make: Callable[[], bytes]) -> bytes:
    """Make a body in a thread, so that the event loop does not wait."""
    return await asyncio.to_thread(make)


def canonical(path: str) -> str:
    """Return the same path for all paths that name the same resource: only known parameters, in a fixed order."""
    split = urllib.parse.urlsplit(path)
    query = urllib.parse.parse_qs(split.query)
    known = [(name, query[name][-1]) for name in PARAMETERS if name in query]
    return f"{split.path.strip('/')}?{urllib.parse.urlencode(known)}"


def _whole(query: Mapping[str, str], name: str, default: int) -> int:
    return _number(name, query[name]) if name in query else default


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 16:
        raise InvalidArgument(f"{name} is {printable(text)[:40]!r}", hint="a whole number, 0 or more")
    return int(text)


# -- errors

STATUS: Final[tuple[tuple[type[StrataError], int], ...]] = (
    (Unauthenticated, 401),
    (PermissionDenied, 403),
    (QuotaExceeded, 429),
    (Refused, 409),
    (NotFound, 404),
    (CheckpointNotFound, 404),
    (InvalidArgument, 400),
)


def problem(error: StrataError) -> tuple[int, bytes]:
    """Return the HTTP status and the body that report an error."""
    code = next((code for kind, code in STATUS if isinstance(error, kind)), 503 if error.retryable else 500)
    return code, msgspec.json.encode(model.Problem(error=error.message, hint=error.hint))
