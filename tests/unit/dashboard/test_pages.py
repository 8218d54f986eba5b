"""The pages: what they say, to whom they stay readable, and that nothing in them is anybody else's."""

from __future__ import annotations

import asyncio
import html.parser
import json
import re
import sys
from collections.abc import Callable, Sequence

import pytest
from starlette.requests import Request

from strata.coordinator.context import EtcdMember
from strata.core.ids import WorkerId
from strata.core.records import (
    BarrierOutcome,
    BarrierResult,
    CheckpointState,
    GenerationRecord,
    JobPhase,
    JobSpec,
    Phase,
    RankStopped,
    StopAction,
    StopNotice,
)
from strata.dashboard.app import _Pages, make_app
from strata.dashboard.choosing import MAX_JOBS
from strata.dashboard.exposition import Exposition
from strata.dashboard.html import join, tag
from strata.dashboard.job import job_detail
from strata.dashboard.layout import POLICY
from strata.dashboard.pages import cluster_page, job_page
from strata.dashboard.status import as_json, cluster_status
from tests.unit.dashboard.rig import KEYS, Shown, anybody

HOSTILE = """<script>alert(1)</script>"'><img src=x onerror=alert(2)>&amp;\u202e\x1b[31m</title></style>"""


class Reader(html.parser.HTMLParser):
    """What a browser would make of a page: the tags with their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._quiet = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._quiet += tag in {"style", "script"}

    def handle_endtag(self, tag: str) -> None:
        self._quiet -= tag in {"style", "script"}

    def handle_data(self, data: str) -> None:
        if not self._quiet:
            self.text += data + " "


def read(page: str) -> Reader:
    return Reader(page)


def of_cluster(shown: Shown) -> str:
    return cluster_page(cluster_status(shown, shown.etcd))


def of_job(shown: Shown, name: str, page: int = 1) -> str:
    detail = job_detail(shown, name, page)
    assert detail is not None
    return job_page(cluster_status(shown, shown.etcd), detail)


# -- markup


def test_what_is_no_markup_is_escaped_wherever_it_stands() -> None:
    assert str(tag("td", "<b>", title='"')) == '<td title="&quot;">&lt;b&gt;</td>'
    assert str(join(["<", tag("b", "x")], " & ")) == "&lt; &amp; <b>x</b>"
    assert str(tag("p", "a\x1b\u202eb")) == "<p>a??b</p>"


async def test_nothing_that_a_program_wrote_becomes_markup() -> None:
    """Every text that comes from outside: hosts, phases, reasons, names, versions, errors, paths."""
    shown = Shown()
    shown.lead()
    shown.ready = (False, HOSTILE)
    shown.version = HOSTILE
    shown.job("job", members=2, host=HOSTILE)
    shown.say("job", 0, 1, HOSTILE[:60])
    shown.arrive("job", "meet", [0], size=2)
    shown.save("job", 5, CheckpointState.ABORTED, ranks=2, reason=HOSTILE)
    shown.put(KEYS.job("job").phase, JobPhase(phase=Phase.FAILED, reason=HOSTILE))
    shown.put(f"{KEYS.jobs}{'x'}{HOSTILE.replace('/', '')}/spec", JobSpec())
    shown.put(
        KEYS.job("job").outcome("meet", 1, 1),
        BarrierOutcome(
            generation=1, round=1, result=BarrierResult.BROKEN, digest="d", reason=HOSTILE, missing=(0,)
        ),
    )
    plain = Shown()
    plain.lead()
    plain.job("job", members=2)
    known = {name for name, _ in read(of_cluster(plain)).tags + read(of_job(plain, "job")).tags}
    known |= {"strong", "progress", "p"}
    for page in (of_cluster(shown), of_job(shown, "job")):
        found = read(page)
        assert {name for name, _ in found.tags} <= known, "a tag that no page of ours has"
        assert sum(name == "script" for name, _ in found.tags) == 1
        assert not [key for _, given in found.tags for key in given if key.startswith("on")]
        assert "alert(1)" in found.text, "shown, as text"
        assert "\x1b" not in page
        assert "\u202e" not in page


# -- what they say


async def test_an_empty_cluster_says_what_to_do_next() -> None:
    shown = Shown()
    shown.lead()
    text = read(of_cluster(shown)).text
    assert "No job yet" in text
    assert "strata run --endpoints h1:50051" in text


async def test_without_a_leader_it_says_what_that_means() -> None:
    text = read(of_cluster(Shown())).text
    assert "nobody leads" in text
    assert "barriers and saves go on" in text


async def test_a_job_shows_who_is_missing_at_a_barrier_and_what_it_does() -> None:
    shown = Shown()
    shown.lead()
    shown.job("job", members=2, slots=2)
    for rank in range(4):
        shown.say("job", rank, 40 + rank, "evaluating" if rank == 3 else "train")
    shown.arrive("job", "before-save", [0, 1, 2], size=4)
    shown.save("job", 20, CheckpointState.OPEN, ranks=4)
    found = read(of_job(shown, "job"))
    words = " ".join(found.text.split())
    assert "before-save" in words
    assert "3 of 4" in words
    assert "missing: 3" in words
    assert "open for 9 s" in words
    assert re.search(r"3 w1 43 \d+ ms ago evaluating", words)
    assert "0 of 4 waits for 0-3" in words


async def test_a_job_whose_records_cannot_be_read_takes_nothing_else_along() -> None:
    shown = Shown()
    shown.lead()
    shown.job("good", members=1)
    shown.put(KEYS.job("spoilt").spec, b"{not json")
    text = read(of_cluster(shown)).text
    assert "good" in text
    assert "unreadable" in text


async def test_known_bugs_of_an_etcd_are_named() -> None:
    shown = Shown()
    shown.etcd = [type(shown.etcd[0])(endpoint="e", version="3.5.4", healthy=True)]
    assert "has known bugs, update to" in read(of_cluster(shown)).text


async def test_the_json_has_what_the_page_has() -> None:
    shown = Shown()
    shown.lead()
    shown.job("job", members=2)
    body = json.loads(json.dumps(as_json(cluster_status(shown, shown.etcd))))
    assert body["leader"] == "r1"
    assert [job["name"] for job in body["jobs"]] == ["job"]
    assert body["jobs"][0]["world_size"] == 2
    assert body["etcd"][0]["version"] == "3.5.30"
    assert {event["kind"] for event in body["events"]} >= {"leader", "coordinator", "member", "generation"}


# -- a large job


def calls_of(look: Callable[[], str]) -> tuple[int, str]:
    """Return how many functions a look calls, and what it shows: work, whatever the machine's speed."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        page = look()
    finally:
        sys.setprofile(before)
    return calls, page


async def test_a_thousand_ranks_stay_readable_and_quick() -> None:
    shown = Shown()
    shown.lead()
    shown.job("big", members=1000)
    for rank in range(990):
        shown.say("big", rank, 500 if rank % 50 else 499, "train")
    shown.arrive("big", "meet", range(0, 1000, 2), size=1000)
    calls, page = calls_of(lambda: of_job(shown, "big", page=3))
    assert calls < 400_000
    assert len(page) < 120_000
    words = " ".join(read(page).text.split())
    assert "990-999" in words, "those that have said nothing, together"
    assert "page 3 of 10" in words
    assert "w299" in words
    assert "w300" not in words
    assert "500 of 1000" in words
    assert "and 480 more" in words


async def test_of_thousands_of_jobs_those_with_members_and_the_latest_are_shown() -> None:
    """All of them took a second of the loop that serves barriers, at each look and each scrape."""
    shown = Shown()
    shown.lead()
    shown.job("old-and-alive", members=1)
    for number in range(2000):
        shown.put(KEYS.job(f"spam-{number:04}").spec, JobSpec())
    status = cluster_status(shown, ())
    names = [job.name for job in status.jobs]
    assert names == ["old-and-alive", *(f"spam-{n}" for n in range(2001 - MAX_JOBS, 2000))]
    assert status.job_count == 2001
    words = " ".join(read(of_cluster(shown)).text.split())
    assert "and 1501 more" in words
    body, _type = Exposition(shown).answer("")
    assert body.count(b"strata_job_phase{") == MAX_JOBS
    assert b"strata_jobs 2001.0" in body


@pytest.mark.parametrize(
    ("asked", "shown_page"), [("", 1), ("2", 2), ("99", 2), ("0", 1), ("x", 1), ("٣", 1)]
)
async def test_a_page_that_is_not_there_is_the_nearest(asked: str, shown_page: int) -> None:
    shown = Shown()
    shown.job("job", members=150)
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/jobs/job",
        "query_string": f"page={asked}".encode(),
        "headers": [],
        "path_params": {"job": "job"},
    }
    answer = await _Pages(shown).job_json(Request(scope))
    assert json.loads(bytes(answer.body))["page"] == shown_page


async def test_for_many_that_look_at_once_it_is_made_once() -> None:
    class Counted(Shown):
        looks = 0

        async def etcd_members(self) -> Sequence[EtcdMember]:
            self.looks += 1
            await asyncio.sleep(0)
            return self.etcd

    shown = Counted()
    pages = _Pages(shown)
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    answers = await asyncio.gather(*(pages.cluster(Request(scope)) for _ in range(64)))
    assert shown.looks == 1
    assert len({bytes(answer.body) for answer in answers}) == 1


# -- the policy


async def test_the_policy_allows_what_the_page_brings_and_no_more() -> None:
    shown = Shown()
    found = read(of_cluster(shown))
    assert "unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'")
    outside = [given for _, given in found.tags if "src" in given or given.get("rel") == "stylesheet"]
    assert outside == [], "everything is in the page"
    assert not [given for _, given in found.tags if "style" in given], "style attributes would be blocked"


def test_the_application_takes_any_source() -> None:
    assert make_app(Shown(), listen="127.0.0.1:0", authorizer=anybody()) is not None


async def test_a_job_that_is_asked_to_stop_says_so_and_its_history_says_how_it_got_there() -> None:
    shown = Shown()
    shown.lead()
    shown.job("digits", members=3)
    keys = KEYS.job("digits")
    began = GenerationRecord(
        epoch=1, members=3, size=3, reason="all 3 members are here", began_unix_ms=1_700_000_000_000
    )
    shown.put(keys.history_of(1), began)
    assert "asked to stop" not in read(of_job(shown, "digits")).text
    shown.put(
        keys.notice(1),
        StopNotice(action=StopAction.DRAIN, reason=HOSTILE, workers=(WorkerId("w1"),), grace_ms=60_000),
    )
    shown.put(keys.stopped_rank(1, 1), RankStopped(worker=WorkerId("w1")))
    told = read(of_job(shown, "digits"))
    assert "asked to stop within 60 s: drain (w1)" in told.text
    assert "1 of 3 have stopped" in told.text
    assert "stopping" in told.text
    assert "2023-11-14 22:13:20" in told.text
    assert "stopping" in read(of_cluster(shown)).text
    assert not [name for name, _ in told.tags if name == "img"]
    data = as_json(job_detail(shown, "digits", 1))
    assert data["notice"]["workers"] == ("w1",)
    assert data["generations"][0]["reason"] == "all 3 members are here"
