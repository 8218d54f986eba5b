"""A development and test tool, no part of Strata: three replicas that show a believable cluster to the dashboard.

    python -m web.fixture                 three replicas, on ports 8101 to 8103
    python -m web.fixture --role viewer   the same for a caller who may only read
    python -m web.fixture --token SECRET  ask for a token
    python -m web.fixture --token SECRET --loopback  whoever shows none may look
    python -m web.fixture --act-after 8   do actions so much later that nobody waits for the answer

Each replica is a process of its own, whose id is printed: end one to see the page go on at another.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.dashboard.api import model as m
from web.fixture_cluster import Cluster

ROOT = Path(__file__).parent.parent
BUNDLE = ROOT / "strata" / "dashboard" / "bundle"
APPENDED = re.compile(r"(/jobs/[^/]+)?/events$|/jobs/[^/]+/history$")


def problem(status: int, error: str, hint: str = "") -> Response:
    return answer(m.Problem(error=error, hint=hint), status)


def answer(body: object, status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


class Replica:
    """One replica's routes."""

    def __init__(
        self, cluster: Cluster, *, role: str, token: str, loopback: bool = False, act_after_s: float = 0.0
    ) -> None:
        self.cluster, self.role, self.token = cluster, role, token
        self.loopback, self.act_after_s = loopback, act_after_s
        self.encoded: dict[tuple[str, int], bytes] = {}
        """The encoded bodies of the current second, shared by all clients of the stream."""

    def app(self) -> ASGIApp:
        action = "/api/v1/jobs/{job}/checkpoints/{step:int}/{action}"
        routes = [
            Route("/api/v1/stream", self.stream),
            Route(action, self.act, methods=["POST"]),
            Route("/api/v1/{path:path}", self.get),
            Route("/{path:path}", self.static),
        ]
        return Headers(Starlette(routes=routes), list(self.cluster.replicas.values()))

    def refused(self, request: Request) -> Response | None:
        shown = request.headers.get("authorization", "")
        if self.token and shown != f"Bearer {self.token}" and (shown or not self.loopback):
            return problem(401, "this cluster wants a token", "strata token create prints one")
        return None

    def me(self, request: Request) -> m.Me:
        known = not self.token or "authorization" in request.headers
        return m.Me(
            identity="ada" if known else "", role=self.role if known else "", jobs=(),
            may_operate=known and self.role == "operator", takes_tokens=bool(self.token),
            cluster="training", replica=self.cluster.name, version="0.1.0",
        )  # fmt: skip

    def body(self, target: str, now: float, after_revision: int = 0) -> object:
        """Return the body for GET of a path with its query; a Problem if the path does not exist."""
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        match url.path.strip("/").split("/"):
            case ["cluster"]:
                return self.cluster.cluster(now)
            case ["events"]:
                return self.cluster.events("", now, after_revision)
            case ["jobs"]:
                page = (query.get(name, "") for name in ("phase", "q", "page_token"))
                return self.cluster.matching_jobs(now, *page)
            case ["jobs", name, *rest]:
                return self.body_of_job(name, rest, query, now, after_revision)
        return m.Problem(error=f"nothing is at {url.path}")

    def body_of_job(
        self, name: str, rest: list[str], query: dict[str, str], now: float, after: int
    ) -> object:
        job = self.cluster.trainings.get(name)
        if job is None:
            summary = next((each for each in self.cluster.jobs(now) if each.name == name), None)
            if summary is None:
                return m.Problem(error=f"no job is called {name}", hint="strata jobs lists them")
            return self.body_of_ended(summary, rest, now)
        match rest:
            case []:
                return job.job(now)
            case ["ranks"]:
                return job.ranks_body(now)
            case ["ranks", rank]:
                return job.rank(int(rank), now) or m.Problem(error=f"job {name} has no rank {rank}")
            case ["devices"]:
                return job.devices(now)
            case ["heatmap"]:
                return job.heatmap(now)
            case ["history"]:
                interval, since = int(query.get("interval_ms", 1000)), int(query.get("since_unix_ms", 0))
                return job.history(now, interval, since)
            case ["barriers"]:
                return self.cluster.barriers(job, now)
            case ["datasets"]:
                return self.cluster.datasets(job, now)
            case ["checkpoints"]:
                begin, found = int(query.get("page_token", 0)), self.cluster.checkpoints(job, now)
                token = str(begin + 25) if begin + 25 < len(found) else ""
                page = tuple(found[begin : begin + 25])
                return m.Checkpoints(checkpoints=page, total=len(found), next_page_token=token)
            case ["generations"]:
                return self.cluster.generations(job, now)
            case ["events"]:
                return self.cluster.events(name, now, after)
        return m.Problem(error=f"nothing is at /jobs/{name}/{'/'.join(rest)}")

    def body_of_ended(self, summary: m.JobSummary, rest: list[str], now: float) -> object:
        empty = {
            "ranks": m.Ranks(
                generation=2, size=0, workers=(), worker=(), step=(), phases=(), phase=(), last_seen_ms=(), stalled_ms=(),
                compute_us=(), median_compute_us=(), relative_score=(), own_score=(),
            ),
            "devices": m.Devices(devices=()),
            "heatmap": m.Heatmap(generation=2, from_unix_ms=int(now * 1000), interval_ms=15000, ranks=0, columns=()),
            "history": m.History(from_unix_ms=int(now * 1000), interval_ms=1000, series={}),
            "barriers": m.Barriers(open=(), ended=(), latency=()),
            "datasets": m.Datasets(datasets=(), cursors=()),
            "checkpoints": m.Checkpoints(checkpoints=(), total=0, next_page_token=""),
            "generations": m.Generations(generations=()),
            "events": m.Events(events=()),
        }  # fmt: skip
        if not rest:
            return m.Job(summary=summary, restored_step=None, failed_in_a_row=0, max_failed_in_a_row=3, findings=(),
                notice=None, goodput=None, reported={})  # fmt: skip
        return empty.get(rest[0], m.Problem(error="nothing is there"))

    async def get(self, request: Request) -> Response:
        if refused := self.refused(request):
            return refused
        if request.path_params["path"] == "me":  # the stream does not include this path
            return answer(self.me(request))
        target = f"/{request.path_params['path']}?{request.url.query}"
        body = self.body(target, time.time())
        return answer(body, 404 if isinstance(body, m.Problem) else 200)

    async def act(self, request: Request) -> Response:
        if refused := self.refused(request):
            return refused
        if request.headers.get("x-strata-action") != "1":
            return problem(400, "the header X-Strata-Action is missing")
        if self.token and "authorization" not in request.headers:
            return problem(401, "a caller without a certificate or token may only read")
        if self.role != "operator":
            return problem(403, f"a {self.role} may not do this", "ask for the role operator")
        job = self.cluster.trainings.get(request.path_params["job"])
        if job is None:
            return problem(404, "no such job")
        body = msgspec.json.decode(await request.body(), type=m.CheckpointAction)
        if self.act_after_s:  # even if the caller has disconnected meanwhile
            await asyncio.sleep(self.act_after_s)
        done = self.cluster.act(
            job, request.path_params["step"], request.path_params["action"], body, time.time()
        )
        return answer(done, 409 if isinstance(done, m.Problem) else 200)

    async def stream(self, request: Request) -> Response:
        if refused := self.refused(request):
            return refused
        watched = request.query_params.getlist("watch")
        after = int(request.headers.get("last-event-id") or 0)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self.changes(watched, after), 200, headers, media_type="text/event-stream")

    async def changes(self, watched: list[str], after: int) -> AsyncIterator[bytes]:
        sent: dict[str, bytes] = {}
        since = dict.fromkeys(watched, 0)
        yield b": begin\n\n"
        while True:
            now = time.time()
            revision = self.cluster.revision(now)
            for path in watched:
                appended = APPENDED.search(urlsplit(path).path)
                if not appended:
                    body = self.whole(path, now)
                elif path.endswith("events"):
                    body = msgspec.json.encode(self.body(path, now, max(after, since[path])))
                    since[path] = revision
                else:
                    newer = f"{path}&since_unix_ms={since[path]}" if since[path] else path
                    body = msgspec.json.encode(self.body(newer, now))
                    interval = 15 if "interval_ms=15000" in path else 1
                    since[path] = int(now // interval) * interval * 1000 - interval * 1000
                if sent.get(path) == body:
                    continue
                sent[path] = body
                if appended and (b'"events":[]' in body or b'"values":[]' in body):
                    continue
                change = msgspec.json.encode(m.Change(path=path, body=msgspec.Raw(body)))
                yield b"event: change\nid: %d\ndata: %s\n\n" % (revision, change)
            yield b": here\n\n"
            await asyncio.sleep(1 - time.time() % 1)

    def whole(self, path: str, now: float) -> bytes:
        key = (path, int(now))
        if key not in self.encoded:
            for old in [each for each in self.encoded if each[1] < int(now) - 2]:
                del self.encoded[old]
            self.encoded[key] = msgspec.json.encode(self.body(path, now))
        return self.encoded[key]

    async def static(self, request: Request) -> Response:
        path = request.path_params["path"]
        file = BUNDLE / path
        if path.startswith("assets/"):
            if not file.is_file():
                return problem(404, "no such file")
            return FileResponse(file, headers={"Cache-Control": "public, max-age=31536000, immutable"})
        return FileResponse(BUNDLE / "index.html", headers={"Cache-Control": "no-cache"})


class Headers:
    """Sets the security policy of the pages, and CORS for the pages of the other replicas."""

    def __init__(self, app: ASGIApp, urls: list[str]) -> None:
        self.app, self.urls = app, urls
        self.policy = (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
            f" connect-src 'self' {' '.join(urls)}"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = next((value.decode() for name, value in scope.get("headers", []) if name == b"origin"), "")
        extra = [(b"content-security-policy", self.policy.encode()), (b"x-content-type-options", b"nosniff")]
        if origin in self.urls:
            extra += [
                (b"access-control-allow-origin", origin.encode()),
                (
                    b"access-control-allow-headers",
                    b"authorization, content-type, last-event-id, x-strata-action",
                ),
                (b"access-control-max-age", b"600"),
                (b"vary", b"origin"),
            ]

        async def with_extra(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, with_extra)
            return
        await self.app(scope, receive, with_extra)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ports", type=int, nargs="+", default=[8101, 8102, 8103])
    parser.add_argument("--role", choices=("viewer", "operator"), default="operator")
    parser.add_argument("--token", default="")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--act-after", type=float, default=0.0)
    parser.add_argument("--began", type=float, default=time.time() - 2.2 * 3600)
    parser.add_argument("--state", type=Path, default=None, help="where actions are kept")
    parser.add_argument("--only", type=int, default=None, help="be this one of the replicas, in this process")
    given = parser.parse_args()
    replicas = {f"r{number}": f"http://127.0.0.1:{port}" for number, port in enumerate(given.ports, 1)}
    if given.only is not None:
        cluster = Cluster(f"r{given.only}", replicas, given.began, given.state)
        app = Replica(
            cluster, role=given.role, token=given.token, loopback=given.loopback, act_after_s=given.act_after
        ).app()
        uvicorn.run(app, port=given.ports[given.only - 1], log_level="warning", timeout_graceful_shutdown=0)
        return
    with tempfile.TemporaryDirectory() as folder:
        state = given.state or Path(folder) / "actions.json"
        shared = [*sys.argv[1:], "--began", str(given.began), "--state", str(state)]
        started = []
        for number, (name, url) in enumerate(replicas.items(), 1):
            started.append(
                subprocess.Popen([sys.executable, "-m", "web.fixture", *shared, "--only", str(number)])
            )
            print(f"{name} {url} pid {started[-1].pid}", flush=True)
        try:
            for process in started:
                process.wait()
        except KeyboardInterrupt:
            pass
        finally:
            for process in started:
                process.terminate()


if __name__ == "__main__":
    main()
