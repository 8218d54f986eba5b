"""The HTTP API: the answer of each path, authorization, and the actions of an operator."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp

from strata.config import CoordinatorConfig, Credentials
from strata.core.access.authority import Role
from strata.core.ids import BootId, WorkerId
from strata.core.job import JobView
from strata.core.kv.records import (
    Assignment,
    CheckpointState,
    DatasetSpec,
    GenerationRecord,
    Origin,
    RankDone,
    StopAction,
    StopNotice,
    Worker,
)
from strata.core.leadership.coordinators import Coordinator
from strata.dashboard.api import model
from strata.dashboard.app import make_app
from strata.dashboard.authorizer import HttpAuthorizer
from strata.errors import Conflict
from strata.security.tokens import TokenFile
from strata.v1.members_pb2 import DeviceStatus, MemberDevices, RankEvidence, RankProgress, TrainingReport
from tests.unit.dashboard.http import ask
from tests.unit.dashboard.rig import KEYS, Shown, anybody


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def app_of(shown: Shown) -> ASGIApp:
    return make_app(shown, authorizer=anybody())


@pytest.fixture
async def shown() -> Shown:
    """A job of two members and four ranks; rank 3 has reported nothing."""
    made = Shown()
    made.lead()
    made.job("gpt", members=2, slots=2)
    keys = KEYS.job("gpt")
    made.put(
        keys.generation(1),
        GenerationRecord(epoch=3, began_unix_ms=5, members=2, size=4, reason="all are here", failure=False),
    )
    made.put(keys.dataset_spec("pages"), DatasetSpec(shards=8, uri="s3://b/{shard}"))
    made.put(
        keys.assignment("pages"),
        Assignment(assign_epoch=2, epoch=3, generation=1, shards=8, workers=("w0", "w1")),  # type: ignore[arg-type]
    )
    made.save("gpt", 7, CheckpointState.COMMITTED, ranks=4)
    for rank in range(3):
        report = RankProgress(rank=rank, step=10 + rank, phase="step", step_us=1, age_ms=200)
        report.step_times.compute_us = 1000 * (rank + 1)
        if rank == 0:
            report.training.CopyFrom(
                TrainingReport(
                    epoch=1,
                    samples=80,
                    target_step=100,
                    reported={"loss": 0.5, "bad": float("nan")},
                    goodput_s={"step": 9.0, "save": 1.0},
                )
            )
        made.board.note("gpt", 1, [report], own=True)
    made.board.note_devices(
        "gpt",
        MemberDevices(worker_id="w0", incarnation=made.world("gpt").members[0].incarnation, devices=[DeviceStatus(index=0, name="H100", fault="Xid 79")]),
        own=True,
    )  # fmt: skip
    made.arrive("gpt", "sync", [0, 1], size=4)
    made.sample()
    return made


KINDS: dict[str, type[Any]] = {
    "me": model.Me,
    "cluster": model.Cluster,
    "jobs": model.Jobs,
    "events": model.Events,
    "jobs/gpt": model.Job,
    "jobs/gpt/ranks": model.Ranks,
    "jobs/gpt/ranks/1": model.Rank,
    "jobs/gpt/devices": model.Devices,
    "jobs/gpt/heatmap": model.Heatmap,
    "jobs/gpt/history": model.History,
    "jobs/gpt/history?interval_ms=15000": model.History,
    "jobs/gpt/barriers": model.Barriers,
    "jobs/gpt/datasets": model.Datasets,
    "jobs/gpt/checkpoints": model.Checkpoints,
    "jobs/gpt/generations": model.Generations,
    "jobs/gpt/events": model.Events,
}


async def get(shown: Shown, path: str) -> Any:
    """Return a resource decoded as its class, whose fields the JSON must match exactly."""
    answer = await ask(app_of(shown), f"/api/v1/{path}")
    assert answer.code == 200, answer.body
    found = msgspec.json.decode(answer.body, type=KINDS[path])
    assert set(answer.json) == {field.name for field in dataclasses.fields(KINDS[path])}
    return found


@pytest.mark.parametrize("path", KINDS)
async def test_each_path_answers_with_its_resource(shown: Shown, path: str) -> None:
    await get(shown, path)


async def test_a_job_shows_its_progress_goodput_and_findings(shown: Shown) -> None:
    job = await get(shown, "jobs/gpt")
    assert (job.summary.progress.step, job.summary.progress.step_high) == (10, 12)
    assert (job.summary.progress.target_step, job.summary.progress.epoch) == (100, 1)
    assert job.reported == {"loss": 0.5, "bad": None}
    assert [part.cause for part in job.goodput.parts] == ["step", "save"]
    assert sum(part.seconds for part in job.goodput.parts) == pytest.approx(job.goodput.wall_s)
    assert sum(part.ratio for part in job.goodput.parts) == pytest.approx(1.0)
    assert [finding.kind for finding in job.findings] == ["device"]
    assert (await get(shown, "jobs")).jobs[0].checkpoint_step == job.summary.checkpoint_step == 7


async def test_ranks_barriers_and_devices_are_shown_with_their_workers(shown: Shown) -> None:
    ranks = await get(shown, "jobs/gpt/ranks")
    assert ranks.step == (10, 11, 12, None)
    assert ranks.compute_us == (1000, 2000, 3000, None)
    assert ranks.worker == (0, 0, 1, 1)
    assert [worker.worker_id for worker in ranks.workers] == ["w0", "w1"]
    assert [ranks.phases[phase] for phase in ranks.phase] == ["step", "step", "step", ""]
    barriers = await get(shown, "jobs/gpt/barriers")
    (sync,) = barriers.open
    assert (sync.arrived, sync.expected, sync.missing_ranks) == (2, 4, "2-3")
    assert [(missing.rank, missing.worker_id, missing.step) for missing in sync.missing] == [(2, "w1", 12), (3, "w1", None)]  # fmt: skip
    assert (await get(shown, "jobs/gpt/devices")).devices[0].fault == "Xid 79"
    assert (await get(shown, "jobs/gpt/ranks/1")).worker_id == "w0"


async def test_a_lost_coordinator_stays_with_the_time_of_its_loss_and_an_alarm(shown: Shown) -> None:
    record = Coordinator(address="h2:50051", unreachable_since_unix_ms=1_699_999_986_000)
    shown.put(KEYS.coordinator("r2"), record)
    shown.put(KEYS.coordinator("r1"), Coordinator(address="h1:50051", unreachable_since_unix_ms=1))
    cluster = await get(shown, "cluster")
    here, lost = cluster.replicas
    assert (here.replica, here.ready, here.unreachable) == ("r1", True, False), "it is registered"
    assert (lost.replica, lost.address, lost.ready, lost.unreachable) == ("r2", "h2:50051", False, True)
    assert (lost.reason, lost.unreachable_since_unix_ms) == ("unreachable for 14 s", 1_699_999_986_000)
    assert cluster.alarms[0].startswith("r2 unreachable; 1 of 2 coordinators ready.")
    assert "strata coordinators forget r2" in cluster.alarms[0]


async def test_a_member_whose_ranks_are_done_is_done_and_not_lost(shown: Shown) -> None:
    keys = KEYS.job("gpt")
    for rank in (0, 1, 2):
        shown.put(keys.done_rank(1, rank), RankDone(worker=WorkerId("w")))
    for worker in ("w0", "w1"):
        shown.remove(keys.worker(worker))
    ranks = await get(shown, "jobs/gpt/ranks")
    ended, lost = ranks.workers
    assert [ranks.phases[phase] for phase in ranks.phase] == ["done", "done", "done", ""]
    assert (ended.done, ended.lost) == (True, False)
    assert (lost.done, lost.lost) == (False, True), "one of its two ranks was not done"


async def test_the_log_of_a_rank_is_not_known_until_its_agent_answers(shown: Shown) -> None:
    async def answered(**evidence: Any) -> Any:
        shown.board.note_evidence("gpt", 1, [RankEvidence(rank=1, **evidence)], own=True)
        return (await get(shown, "jobs/gpt/ranks/1")).log_file

    assert (await get(shown, "jobs/gpt/ranks/1")).log_file is None
    assert await answered() == "", "it keeps none"
    assert await answered(log_file="/logs/1") == "/logs/1"


async def test_drained_members_and_standbys_are_leaving(shown: Shown) -> None:
    shown.put(
        KEYS.job("gpt").worker("spare"),
        Worker(boot=BootId("b"), served_by=shown.instance, host="h9", slots=2),
    )

    async def leaving() -> dict[str, bool]:
        return {each.worker_id: each.leaving for each in (await get(shown, "jobs/gpt/ranks")).workers}

    assert await leaving() == {"w0": False, "w1": False, "spare": False}
    requested = (WorkerId("w1"), WorkerId("spare"))
    shown.put(
        KEYS.job("gpt").notice(1), StopNotice(action=StopAction.DRAIN, reason="a fan", workers=requested)
    )
    assert await leaving() == {"w0": False, "w1": True, "spare": True}


async def test_checkpoints_and_datasets_are_shown(shown: Shown) -> None:
    (saved,) = (await get(shown, "jobs/gpt/checkpoints")).checkpoints
    assert (saved.step, saved.state, saved.pinned) == (7, "committed", False)
    (pages,) = (await get(shown, "jobs/gpt/datasets")).datasets
    assert pages.shards == sum(pages.owned.values()) == 8


@pytest.mark.parametrize(
    ("path", "code", "says"),
    [
        ("jobs/nobody", 404, "no job nobody exists"),
        ("jobs/nobody/ranks", 404, "no job nobody exists"),
        ("jobs/gpt/nothing", 404, "there is no /jobs/gpt/nothing"),
        ("nothing", 404, "there is no /nothing"),
        ("jobs/gpt/ranks/4", 404, "nothing of that name"),
        ("jobs/gpt/ranks/x", 400, "rank is 'x'"),
        ("jobs/gpt/history?interval_ms=7", 400, "interval_ms is 7"),
        ("jobs/gpt/history?since_unix_ms=-1", 400, "since_unix_ms"),
        ("stream", 400, "0 paths are watched"),
    ],
)
async def test_an_unknown_path_or_invalid_parameter_is_a_problem(
    shown: Shown, path: str, code: int, says: str
) -> None:
    answer = await ask(app_of(shown), f"/api/v1/{path}")
    assert answer.code == code
    assert says in msgspec.json.decode(answer.body, type=model.Problem).error


async def test_jobs_come_in_pages_filtered_and_running_ones_first(shown: Shown) -> None:
    for number in range(250):
        shown.put(KEYS.job(f"old-{number:03}").spec, b"{}")
    first = (await ask(app_of(shown), "/api/v1/jobs")).json
    assert (first["total"], len(first["jobs"]), first["jobs"][0]["name"]) == (251, 200, "gpt")
    rest = (await ask(app_of(shown), f"/api/v1/jobs?page_token={first['next_page_token']}")).json
    assert (len(rest["jobs"]), rest["next_page_token"]) == (51, "")
    assert not {job["name"] for job in first["jobs"]} & {job["name"] for job in rest["jobs"]}
    assert [job["name"] for job in (await ask(app_of(shown), "/api/v1/jobs?q=GP")).json["jobs"]] == ["gpt"]
    assert (await ask(app_of(shown), "/api/v1/jobs?phase=waiting")).json["total"] == 250


# -- actions of an operator

MARK = {"X-Strata-Action": "1"}


async def post(
    shown: Shown,
    path: str,
    body: bytes = b"{}",
    app: ASGIApp | None = None,
    headers: Mapping[str, str] = MARK,
) -> Any:
    return await ask(
        app or app_of(shown),
        f"/api/v1/jobs/gpt/checkpoints/{path}",
        method="POST",
        body=body,
        headers=headers,
    )


@pytest.mark.parametrize(
    ("action", "body", "call", "field"),
    [
        ("pin", b'{"why":"best"}', "pin_checkpoint", ("why", "best")),
        ("unpin", b"", "unpin_checkpoint", ("step", 7)),
        ("tag", b'{"tag":"best"}', "tag_checkpoint", ("tag", "best")),
        ("untag", b'{"tag":"best"}', "untag_checkpoint", ("tag", "best")),
        ("delete", b"{}", "delete_checkpoint", ("step", 7)),
        ("fork", b'{"into":"next"}', "fork_checkpoint", ("source_job", "gpt")),
    ],
)
async def test_an_http_action_becomes_the_matching_rpc(
    shown: Shown, action: str, body: bytes, call: str, field: tuple[str, Any]
) -> None:
    answer = await post(shown, f"7/{action}", body)
    assert answer.code == 200, answer.body
    assert answer.json["step"] == 7
    ((name, request, identity),) = shown.calls
    assert (name, identity) == (call, None)
    assert getattr(request, field[0]) == field[1]
    assert (request.step, request.attempt) == (7, "a7"), "the one attempt of the step"


async def test_an_action_on_a_step_that_was_not_saved_reaches_nothing_else(shown: Shown) -> None:
    for action, body in (("untag", b'{"tag":"best"}'), ("pin", b"{}"), ("fork", b'{"into":"next"}')):
        answer = await post(shown, f"8/{action}", body)
        assert (answer.code, shown.calls) == (404, []), action
        assert "of step 8 exists" in answer.json["error"]


async def test_an_action_with_an_unsupported_field_is_refused(shown: Shown) -> None:
    answer = await post(shown, "7/delete", b'{"why":"too large"}')
    assert (answer.code, answer.json["error"]) == (400, "delete takes no why")
    assert (await post(shown, "7/pin", b'{"tag":"best"}')).code == 400
    assert shown.calls == []


async def test_a_deletion_that_removes_the_record_at_once_succeeds(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork has no bytes of its own, so its record is deleted immediately (PROTOCOLS 8.6)."""

    async def delete(_name: str, _request: Any, _identity: Any) -> None:
        shown.remove(KEYS.job("gpt").checkpoint(7, 1))

    monkeypatch.setattr(shown, "call", delete)
    answer = await post(shown, "7/delete")
    assert (answer.code, answer.json) == (200, None)


async def test_a_fork_names_the_job_that_has_its_bytes(shown: Shown) -> None:
    held = JobView(shown.view, KEYS.job("gpt")).checkpoint(7, 1)
    assert held is not None
    origin = Origin(job="source", step=7, generation=1)
    shown.put(held.key, dataclasses.replace(held.record, origin=origin))
    (fork,) = (await get(shown, "jobs/gpt/checkpoints")).checkpoints
    assert fork.origin_job == "source"


async def test_a_member_that_a_stop_notice_names_is_leaving(shown: Shown) -> None:
    notice = StopNotice(
        action=StopAction.DRAIN, reason="maintenance", workers=(WorkerId("w1"),), grace_ms=30_000
    )
    shown.put(KEYS.job("gpt").notice(1), notice)
    workers = (await get(shown, "jobs/gpt/ranks")).workers
    assert [(each.worker_id, each.leaving) for each in workers] == [("w0", False), ("w1", True)]


async def test_invalid_actions_are_refused(shown: Shown) -> None:
    assert (await post(shown, "7/pin", headers={})).code == 403, "a form of another site could have sent it"
    assert (await post(shown, "7/eat")).code == 404
    assert (await post(shown, "7/pin", b"[")).code == 400
    assert (await post(shown, "7/pin", b" " * 20_000)).code == 400
    assert (await post(shown, "7/pin", headers={**MARK, "Origin": "http://evil.example"})).code == 403
    assert (await ask(app_of(shown), "/jobs/gpt", method="POST")).code == 405
    assert shown.calls == []
    shown.refuses = Conflict("it is open")
    refused = await post(shown, "7/pin")
    assert (refused.code, refused.json["error"]) == (409, "it is open")


# -- authorization


def authorized(tmp_path: Path, listen: str) -> tuple[HttpAuthorizer, dict[str, str]]:
    """Return the authorizer of a coordinator that accepts tokens, and the tokens by name."""
    accepted = tmp_path / "accepted.json"
    tokens = {
        name: TokenFile(accepted).add(role=role, id=name, jobs=jobs, now=now(), days=None)[1]
        for name, role, jobs in (
            ("viewer", Role.VIEWER, ()),
            ("operator", Role.OPERATOR, ()),
            ("limited", Role.VIEWER, ("other",)),
        )
    }
    config = CoordinatorConfig(
        http_listen=listen, accepted_tokens_file=accepted, credentials=Credentials(token_file=accepted, insecure=True)
    )  # fmt: skip
    return HttpAuthorizer(config, now=now), tokens


async def test_on_loopback_every_client_reads_and_only_operators_act(shown: Shown, tmp_path: Path) -> None:
    authorizer, tokens = authorized(tmp_path, "127.0.0.1:0")
    app = make_app(shown, authorizer=authorizer)
    assert (await ask(app, "/api/v1/jobs/gpt")).code == 200
    nobody = (await ask(app, "/api/v1/me")).json
    assert (nobody["identity"], nobody["may_operate"], nobody["takes_tokens"]) == ("", False, True)
    assert (await post(shown, "7/pin", app=app)).code == 401
    for name, may in (("viewer", False), ("operator", True)):
        bearer = {"Authorization": f"Bearer {tokens[name]}"}
        me = (await ask(app, "/api/v1/me", headers=bearer)).json
        assert (me["identity"], me["role"], me["may_operate"]) == (name, name, may)
    assert (await ask(app, "/api/v1/me", headers={"Authorization": "Bearer nonsense"})).code == 401
    shown.refuses = None
    assert (
        await post(shown, "7/pin", app=app, headers={**MARK, "Authorization": f"Bearer {tokens['operator']}"})
    ).code == 200
    assert str(shown.calls[-1][2]) == "operator operator"


async def test_a_cluster_that_takes_no_tokens_offers_no_sign_in(shown: Shown, tmp_path: Path) -> None:
    anywhere = Credentials(insecure=True)
    for config in (CoordinatorConfig(), CoordinatorConfig(http_listen="0.0.0.0:0", credentials=anywhere)):
        authorizer = HttpAuthorizer(config, now=now)
        app = make_app(shown, authorizer=authorizer)
        me = (await ask(app, "/api/v1/me")).json
        assert (me["identity"], me["may_operate"], me["takes_tokens"]) == ("", True, False)


async def test_away_from_loopback_every_read_requires_a_credential(shown: Shown, tmp_path: Path) -> None:
    authorizer, tokens = authorized(tmp_path, "0.0.0.0:0")
    app = make_app(shown, authorizer=authorizer)
    for path in ("me", "cluster", "jobs/gpt", "stream?watch=/jobs"):
        assert (await ask(app, f"/api/v1/{path}")).code == 401
    limited = {"Authorization": f"Bearer {tokens['limited']}"}
    assert (await ask(app, "/api/v1/jobs/gpt", headers=limited)).code == 403
    assert (await ask(app, "/api/v1/jobs", headers=limited)).json["jobs"] == []
    assert (await ask(app, "/api/v1/events", headers=limited)).json["events"] == []
    viewer = {"Authorization": f"Bearer {tokens['viewer']}"}
    assert (await ask(app, "/api/v1/jobs", headers=viewer)).json["total"] == 1
    assert (await ask(app, "/api/v1/events", headers=viewer)).json["events"] != []


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "0.0.0.0:0"])
@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("10.1.2.3:80", 200),
        ("[::1]:80", 200),
        ("LocalHost:1", 200),
        ("h1:8080", 200),
        ("h1", 200),
        ("H1.:9", 200),
        ("evil.example", 421),
        ("evil.example:8080", 421),
        ("h1.evil.example:8080", 421),
        ("localhost.evil.example", 421),
    ],
)
async def test_without_authentication_a_foreign_host_name_is_refused(
    shown: Shown, listen: str, host: str, code: int
) -> None:
    config = CoordinatorConfig(http_listen=listen, credentials=Credentials(insecure=True))
    app = make_app(shown, authorizer=HttpAuthorizer(config, now=now))
    for path in ("/api/v1/jobs/gpt", "/metrics", "/status", "/"):
        assert (await ask(app, path, headers={"Host": host})).code == code
    for probe in ("/healthz", "/readyz"):
        assert (await ask(app, probe, headers={"Host": host})).code == 200


async def test_with_authentication_any_host_name_is_answered(shown: Shown, tmp_path: Path) -> None:
    authorizer, tokens = authorized(tmp_path, "0.0.0.0:0")
    headers = {"Host": "strata.example", "Authorization": f"Bearer {tokens['viewer']}"}
    assert (
        await ask(make_app(shown, authorizer=authorizer), "/api/v1/jobs/gpt", headers=headers)
    ).code == 200


async def test_only_pages_of_replicas_may_call_the_api(shown: Shown) -> None:
    app, peer = app_of(shown), "http://h1:8080"
    for origin, allowed in ((peer, True), ("http://localhost", True), ("http://evil.example", False)):
        answer = await ask(app, "/api/v1/me", headers={"Origin": origin})
        assert ("access-control-allow-origin" in answer.headers) is allowed
        before = await ask(app, "/api/v1/me", method="OPTIONS", headers={"Origin": origin})
        assert answer.code == (200 if allowed else 403)
        assert before.code == (204 if allowed else 403)
        assert ("x-strata-action" in before.headers.get("access-control-allow-headers", "")) is allowed
