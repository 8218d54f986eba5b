"""The stream of the HTTP API: an event carries the body that a GET of its path returns now."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from starlette.types import ASGIApp

from strata.core.kv.records import CheckpointState
from strata.dashboard.api import resources
from strata.dashboard.api.stream import MAX_PER_ADDRESS, SEND_S
from strata.dashboard.app import make_app
from strata.errors import Unauthenticated
from strata.testing.virtual_time import in_virtual_time
from tests.unit.dashboard.http import ask, streaming
from tests.unit.dashboard.rig import KEYS, Shown, anybody


@pytest.fixture(autouse=True)
def _beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the work of threads at once: there are no threads in virtual time."""

    async def at_once(make: Callable[[], bytes]) -> bytes:
        return make()

    monkeypatch.setattr(resources, "in_thread", at_once)


def made() -> tuple[Shown, ASGIApp]:
    shown = Shown()
    shown.unix_s = lambda: 1.7e9 + asyncio.get_running_loop().time()
    shown.lead()
    shown.job("gpt", members=1)
    shown.say("gpt", 0, 5, "step")
    shown.sample()
    return shown, make_app(shown, authorizer=anybody())


@in_virtual_time()
async def test_a_resource_is_sent_at_once_and_again_when_it_changes() -> None:
    shown, app = made()
    async with streaming(app, "watch=/jobs/gpt/checkpoints&watch=/jobs/gpt/generations") as stream:
        assert stream.code == 200
        assert stream.stayed == 1
        assert [path for _id, path, _body in stream.changes()] == [
            "/jobs/gpt/checkpoints",
            "/jobs/gpt/generations",
        ]
        await asyncio.sleep(5)
        assert len(stream.changes()) == 2
        assert len(stream.pieces) >= 6, "it says every second that it is there"
        shown.save("gpt", 7, CheckpointState.COMMITTED, ranks=1)
        await asyncio.sleep(1.2)
        (number, path, body) = stream.changes()[2]
        assert (number, path) == (shown.view.revision, "/jobs/gpt/checkpoints")
        assert body == (await ask(app, "/api/v1/jobs/gpt/checkpoints")).json


@in_virtual_time()
async def test_events_are_sent_once_even_if_a_client_reconnects_elsewhere() -> None:
    shown, app = made()
    async with streaming(app, "watch=/events") as stream:
        before = len(stream.bodies("/events")[0]["events"])
        shown.job("other", members=1)
        await asyncio.sleep(1.2)
        last = stream.changes()[-1][0]
    shown.job("third", members=1)
    other = make_app(shown, authorizer=anybody())
    async with streaming(other, "watch=/events", {"Last-Event-ID": str(last)}) as again:
        await asyncio.sleep(2)
        bodies = [*stream.bodies("/events"), *again.bodies("/events")]
    seen = [(event["revision"], event["text"]) for body in bodies for event in body["events"]]
    assert len(seen) == len(set(seen)) > before
    assert {"other", "third"} <= {event["job"] for body in bodies for event in body["events"]}
    assert len(again.bodies("/events")) == 1, "and nothing is sent where nothing happened"


@in_virtual_time()
async def test_no_id_runs_ahead_of_the_events_that_were_sent() -> None:
    shown, app = made()
    async with streaming(app, "watch=/jobs/gpt/checkpoints&watch=/events") as stream:
        for step in range(10):
            shown.save("gpt", step, CheckpointState.COMMITTED, ranks=1)
            shown.job(f"job-{step}", members=1)
            await asyncio.sleep(0.37)
    sent = 0
    for number, path, body in stream.changes():
        if path == "/events":
            sent = max(sent, *(event["revision"] for event in body["events"]))
        assert number >= 0
        later = [
            event["revision"] for _n, of, b in stream.changes() if of == "/events" for event in b["events"]
        ]
        assert not [revision for revision in later if sent < revision <= number]


@in_virtual_time()
async def test_history_comes_in_parts_that_follow_each_other() -> None:
    shown, app = made()
    async with streaming(app, "watch=/jobs/gpt/history") as stream:
        for step in range(20):
            shown.say("gpt", 0, 6 + step, "step")
            shown.sample()
            await asyncio.sleep(1)
        parts = [body for body in stream.bodies("/jobs/gpt/history") if body["series"]]
    ends = [
        (part["from_unix_ms"], part["from_unix_ms"] + 1000 * len(part["series"]["step"]["values"]))
        for part in parts
    ]
    assert len(ends) > 15
    assert all(end == begun for (_, end), (begun, _) in itertools.pairwise(ends))
    values = [value for part in parts for value in part["series"]["step"]["values"]]
    assert values == sorted(values)
    assert None not in values


@in_virtual_time()
async def test_deleting_a_watched_job_sends_an_error_and_keeps_the_stream_open() -> None:
    shown, app = made()
    async with streaming(app, "watch=/jobs/gpt&watch=/cluster") as stream:
        for key in [kv.key for kv in shown.view.walk(KEYS.job("gpt").root)]:
            shown.remove(key)
        await asyncio.sleep(2)
        assert stream.bodies("/jobs/gpt")[-1]["error"] == "no job gpt exists"
        assert stream.bodies("/cluster")[-1]["jobs_total"] == 0


@in_virtual_time()
async def test_an_invalid_path_gets_one_error_and_other_paths_continue() -> None:
    _shown, app = made()
    wrong = (
        "/nothing",
        "//[",
        "/jobs/gpt/history?interval_ms=0",
        "/jobs/gpt/history?interval_ms=x",
        "/jobs/none/events",
    )
    async with streaming(app, "&".join(f"watch={quote(path)}" for path in (*wrong, "/cluster"))) as stream:
        await asyncio.sleep(3)
        assert stream.code == 200
        assert [len(stream.bodies(path)) for path in wrong] == [1] * len(wrong)
        assert all("error" in stream.bodies(path)[0] for path in wrong)
        assert len(stream.bodies("/cluster")) >= 2


@in_virtual_time()
async def test_one_body_is_built_for_all_watchers() -> None:
    shown, app = made()
    async with (
        streaming(app, "watch=/cluster"),
        streaming(app, "watch=/cluster"),
        streaming(app, "watch=/cluster"),
    ):
        await asyncio.sleep(10.5)
    assert shown.etcd_requests <= 12


@in_virtual_time()
async def test_a_reader_that_stops_is_cut_off_and_streams_are_limited() -> None:
    _shown, app = made()
    async with streaming(app, "watch=/cluster") as stream:
        stream.stuck = True
        await asyncio.sleep(SEND_S + 2)
        async with asyncio.TaskGroup() as tasks:
            held = [tasks.create_task(hold(app)) for _ in range(MAX_PER_ADDRESS)]
            await asyncio.sleep(1)
            assert [task.result().code for task in held if task.done()] == [], (
                "the one that was cut off is not counted"
            )
            refused = await ask(app, "/api/v1/stream?watch=/cluster")
            assert (refused.code, "streams are open" in refused.json["error"]) == (429, True)
            for task in held:
                task.cancel()


async def hold(app: ASGIApp) -> Any:
    async with streaming(app, "watch=/jobs") as stream:
        if stream.code != 200:
            return stream
        await asyncio.sleep(100)
    return stream


@in_virtual_time()
async def test_a_stream_ends_once_its_caller_is_no_longer_authorized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown, _app = made()
    authorizer = anybody()
    app = make_app(shown, authorizer=authorizer)

    def refuse(*_args: object) -> None:
        raise Unauthenticated("revoked")

    async with streaming(app, "watch=/jobs/gpt") as stream:
        monkeypatch.setattr(authorizer, "check", refuse)
        await asyncio.sleep(authorizer.review_s + 2)
        count = len(stream.pieces)
        await asyncio.sleep(5)
        assert len(stream.pieces) == count
