"""`/status`: plain text for curl and HTML for browsers, from the same resources as the API."""

from __future__ import annotations

import pytest

from strata.coordinator.etcd.members import EtcdMember
from strata.core.ids import BootId, WorkerId
from strata.core.kv.records import CheckpointState, Standbys, Worker
from strata.core.leadership.coordinators import Coordinator
from strata.dashboard.app import make_app
from strata.errors import InvalidArgument
from tests.unit.dashboard.http import Answer, ask
from tests.unit.dashboard.rig import KEYS, Shown, anybody

HTML = {"Accept": "text/html,application/xhtml+xml"}


@pytest.fixture
async def shown() -> Shown:
    made = Shown()
    made.lead()
    made.job("gpt", members=2, host="<b>host</b>")
    made.say("gpt", 0, 5, "step")
    made.save("gpt", 7, CheckpointState.ABORTED, ranks=2, reason="<script>\x1b[31m")
    made.arrive("gpt", "sync", [0], size=2)
    made.sample()
    return made


async def look(shown: Shown, path: str, headers: dict[str, str] | None = None) -> Answer:
    return await ask(make_app(shown, authorizer=anybody()), path, headers=headers or {})


async def test_the_cluster_and_a_job_in_plain_text(shown: Shown) -> None:
    cluster = (await look(shown, "/status")).body.decode()
    assert "leader: r1" in cluster
    assert any(line.split()[:2] == ["gpt", "running"] for line in cluster.splitlines())
    answer = await look(shown, "/status/gpt")
    text = answer.body.decode()
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert any(line.split()[:5] == ["sync", "1", "1", "of", "2"] for line in text.splitlines())
    assert "aborted" in text
    assert "\x1b" not in text, "a terminal obeys it"


async def test_standbys_count_once_as_members_and_wide_tables_hint_at_scrolling(
    shown: Shown,
) -> None:
    keys = KEYS.job("gpt")
    shown.put(keys.worker("w2"), Worker(boot=BootId("b"), served_by=shown.instance, host="h", slots=1, pid=1))
    shown.put(keys.standbys, Standbys(workers=(WorkerId("w2"),)))
    text = (await look(shown, "/status/gpt")).body.decode()
    assert "generation 1, 2 ranks, 3 members (1 standby)" in text
    html = (await look(shown, "/status", HTML)).body.decode()
    assert "100% local" in html, "a shade at the edge, over which the content moves"


async def test_a_reason_widens_no_column_but_the_last(shown: Shown) -> None:
    shown.etcd = (EtcdMember(endpoint="e1:2379", error="failed to connect " * 20),)
    shown.put(KEYS.coordinator("r2"), Coordinator(address="h2:50051", unreachable_since_unix_ms=1))
    text = (await look(shown, "/status")).body.decode()
    (row,) = [line for line in text.splitlines() if line.startswith("  r2 ")]
    assert row.split()[:5] == ["r2", "\N{EN DASH}", "no", "h2:50051", "\N{EN DASH}"]
    assert "unreachable for " in row
    (row,) = [line for line in text.splitlines() if line.startswith("  e1:2379 ")]
    assert row.split()[:6] == ["e1:2379", "member", "\N{EN DASH}", "0", "B", "no"]
    assert "failed to connect failed" in row


async def test_html_runs_nothing_and_escapes_all(shown: Shown) -> None:
    body = ""
    for path in ("/status", "/status/gpt"):
        answer = await look(shown, path, HTML)
        body = answer.body.decode()
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "script" not in answer.headers["content-security-policy"]
        assert "<script" not in body
        assert "<b>host" not in body
        assert "http" not in body.partition("</head>")[2], "nothing is loaded from anywhere"
    assert "&lt;script&gt;" in body
    assert "sync" in body


async def test_a_missing_page_is_404_and_an_unreadable_record_500(shown: Shown) -> None:
    assert (await look(shown, "/status/none")).code == 404
    assert (await look(shown, "/status/%00", HTML)).code == 404
    shown.put(KEYS.job("gpt").head, b"not a record")
    broken = await look(shown, "/status/gpt")
    assert broken.code == 500
    assert (await look(shown, "/status")).code == 200
    with pytest.raises(InvalidArgument):
        KEYS.job("\0")


async def test_a_page_is_built_once_a_second_for_all_readers(shown: Shown) -> None:
    app = make_app(shown, authorizer=anybody())
    for _ in range(10):
        await ask(app, "/status")
    assert shown.etcd_requests == 1
    await ask(app, "/status", headers=HTML)
    assert shown.etcd_requests == 2
