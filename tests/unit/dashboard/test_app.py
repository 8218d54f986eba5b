"""The application: the answer of each path, and its headers."""

from __future__ import annotations

import pytest
from starlette.types import Message

from strata.core.kv.records import CheckpointState
from strata.dashboard.app import make_app
from tests.unit.dashboard.rig import KEYS, Shown, anybody


class Answer:
    """The application's answer to one request."""

    def __init__(self, messages: list[Message]) -> None:
        self.code = int(messages[0]["status"])
        self.headers = {key.decode(): value.decode() for key, value in messages[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in messages[1:])


async def ask(shown: Shown, path: str, *, method: str = "GET", host: str = "localhost") -> Answer:
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        messages.append(message)

    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", host.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await make_app(shown, authorizer=anybody())(scope, receive, send)
    return Answer(messages)


@pytest.fixture
def shown() -> Shown:
    made = Shown()
    made.lead()
    made.job("job", members=2)
    made.save("job", 7, CheckpointState.COMMITTED, ranks=2)
    return made


async def test_an_unready_or_unhealthy_replica_answers_503_with_the_reason(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await ask(shown, "/readyz")).code == 200
    shown.ready = (False, "etcd has not answered for 3.0 s")
    answer = await ask(shown, "/readyz")
    assert (answer.code, answer.body) == (503, b"etcd has not answered for 3.0 s\n")
    assert (await ask(shown, "/healthz")).code == 200, "it turns all the same"
    monkeypatch.setattr(shown, "is_healthy", lambda: (False, "the event loop stalled for 4.0 s"))
    assert (await ask(shown, "/healthz")).code == 503


async def test_every_page_shows_the_reason_while_etcd_is_not_writable(shown: Shown) -> None:
    why = "nothing can be written: etcd's quota is used up (alarm NOSPACE)"
    assert b"strata_writable 1.0" in (await ask(shown, "/metrics")).body
    shown.unwritable = why
    shown.impossible["job"] = ("barrier b/1: the floor is 3, and that round has no outcome",)
    answer = await ask(shown, "/readyz")
    assert (answer.code, answer.body) == (503, f"{why}\n".encode())
    assert (await ask(shown, "/healthz")).code == 200
    metrics = (await ask(shown, "/metrics")).body
    assert b"strata_writable 0.0" in metrics
    assert b"strata_ready 0.0" in metrics
    for path in ("/api/v1/jobs/job", "/api/v1/jobs", "/status/job", "/status"):
        assert "the floor is 3, and that round has no outcome" in (await ask(shown, path)).body.decode()
    for path in ("/api/v1/cluster", "/status"):
        assert (
            "quota is used up (alarm NOSPACE). Sessions and reads go on"
            in (await ask(shown, path)).body.decode()
        )


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/jobs/job",
        "/status",
        "/status/none",
        "/api/v1/cluster",
        "/api/v1/jobs/job",
        "/metrics",
        "/healthz",
        "/x",
    ],
)
async def test_nothing_is_cached_sniffed_or_framed(shown: Shown, path: str) -> None:
    headers = (await ask(shown, path)).headers
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    if headers.get("content-type", "").startswith("text/html"):
        assert headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/status/job", 200),
        ("/status/none", 404),
        ("/status/no%20name!", 404),
        ("/status/<script>", 404),
        ("/api/v1/jobs/none", 404),
        ("/status/job/more", 404),
        ("/assets/none.js", 404),
        ("/assets/../index.html", 404),
        ("/../etc/passwd", 404),
    ],
)
async def test_an_unknown_path_is_404(shown: Shown, path: str, code: int) -> None:
    answer = await ask(shown, path)
    assert answer.code == code
    assert b"<script>alert" not in answer.body


async def test_a_job_that_cannot_be_read_is_500_with_the_reason(shown: Shown) -> None:
    shown.put(KEYS.job("job").head, b"{not json")
    for path in ("/status/job", "/api/v1/jobs/job"):
        answer = await ask(shown, path)
        assert answer.code == 500
        assert b"not a WorldHead record" in answer.body
    assert (await ask(shown, "/status")).code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
async def test_only_reading_methods_are_allowed(shown: Shown, method: str) -> None:
    assert (await ask(shown, "/", method=method)).code == 405


async def test_a_head_request_is_answered(shown: Shown) -> None:
    assert (await ask(shown, "/healthz", method="HEAD")).code == 200
