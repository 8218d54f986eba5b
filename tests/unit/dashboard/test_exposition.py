"""`/metrics` of a replica whose state is filled by hand."""

from __future__ import annotations

import asyncio
import re

from prometheus_client.parser import text_string_to_metric_families

from strata.core.ids import WorkerId
from strata.core.kv.records import Ack, CheckpointState
from strata.core.leadership.coordinators import Coordinator
from strata.dashboard.exposition import Exposition
from strata.v1.members_pb2 import DeviceStatus, MemberDevices, RankProgress, TrainingReport
from tests.conftest import ROOT
from tests.unit.dashboard.rig import KEYS, Shown

PAGE = ROOT / "docs" / "observability.md"
HEARTBEAT = "strata_worker_heartbeat_age_seconds"


async def exposed(shown: Shown) -> dict[str, list[tuple[dict[str, str], float]]]:
    body, _content_type = await Exposition(shown).answer("")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_gauges_show_the_current_view() -> None:
    shown = Shown()
    shown.lead()
    shown.job("a", members=3, slots=2)
    shown.arrive("a", "meet", [0], size=6)
    metrics = await exposed(shown)
    assert metrics["strata_job_world_size"] == [({"job": "a"}, 6)]
    assert metrics["strata_job_members"] == [({"job": "a"}, 3)]
    assert metrics["strata_job_open_barriers"] == [({"job": "a"}, 1)]
    assert metrics["strata_job_phase"] == [({"job": "a", "phase": "running"}, 1)]
    assert metrics["strata_sessions"] == [({}, 7)]
    assert "strata_job_latest_step" not in metrics, "there is none"


async def test_an_unreachable_replica_is_not_ready_and_has_a_duration() -> None:
    shown = Shown()
    shown.lead()
    assert "strata_replica_unreachable_seconds" not in await exposed(shown)
    shown.put(KEYS.coordinator("r2"), Coordinator(unreachable_since_unix_ms=1_699_999_986_000))
    metrics = await exposed(shown)
    assert metrics["strata_replica_ready"] == [({"replica": "r1"}, 1), ({"replica": "r2"}, 0)]
    assert metrics["strata_replica_unreachable_seconds"] == [({"replica": "r2"}, 14)]
    assert metrics["strata_replicas"] == [({}, 1)]


async def test_a_job_that_cannot_be_read_spoils_no_scrape() -> None:
    shown = Shown()
    shown.lead()
    shown.job("good", members=1)
    shown.put(KEYS.job("spoilt").head, b"{not json")
    shown.put(f"{KEYS.jobs}no name!/spec", b"{}")
    assert (await exposed(shown))["strata_job_world_size"] == [({"job": "good"}, 1)]


async def test_finding_labels_match_the_finding_text() -> None:
    shown = Shown()
    shown.lead()
    shown.job("a", members=1, slots=2, host="h7")
    sick = [DeviceStatus(index=index, fault="Xid 79") for index in (0, 1)]
    member = MemberDevices(worker_id="w0", incarnation=shown.world("a").members[0].incarnation, devices=sick)
    shown.board.note_devices("a", member, own=True)
    found = shown.diagnosis("a").findings
    labels = [labels for labels, _value in (await exposed(shown))["strata_job_finding"]]
    assert [each["device"] for each in labels] == ["0", "1"], "two devices are two findings"
    for finding, label in zip(found, labels, strict=True):
        assert finding.host == label["host"] == "h7"
        assert label["host"] in finding.text
        assert label["device"] in finding.text
        assert label["cause"] in finding.text
        assert (label["job"], label["kind"], label["rank"]) == ("a", "device", finding.rank_runs)


async def test_a_member_s_heartbeat_age_ends_with_the_member() -> None:
    shown = Shown()
    shown.lead()
    shown.job("a", members=2)
    shown.ages["a"] = [("w0", 0.25), ("w1", 12.0)]
    ages = {labels["worker"]: value for labels, value in (await exposed(shown))[HEARTBEAT]}
    assert ages == {"w0": 0.25, "w1": 12.0}
    shown.ages["a"] = [("w0", 0.5)]
    assert (await exposed(shown))[HEARTBEAT] == [({"job": "a", "worker": "w0"}, 0.5)]
    for key in [kv.key for kv in shown.view.walk(KEYS.job("a").root)]:
        shown.remove(key)
    assert HEARTBEAT not in await exposed(shown)


async def test_samples_and_goodput_are_those_that_rank_0_reports() -> None:
    shown = Shown()
    shown.lead()
    for name in ("told", "silent"):
        shown.job(name, members=1)
    for step in (1, 2, 3):
        training = TrainingReport(samples=64 * step, goodput_s={"step": 3.0 * step, "save": 1.0 * step})
        report = RankProgress(rank=0, step=step, phase="step", training=training)
        shown.board.note("told", 1, [report], own=True)
        shown.board.note("silent", 1, [RankProgress(rank=0, step=step, phase="step")], own=True)
        shown.sample()
        await asyncio.sleep(0.05)
    metrics = await exposed(shown)
    assert metrics["strata_job_samples"] == [({"job": "told"}, 192)]
    ((labels, rate),) = metrics["strata_job_samples_per_second"]
    assert labels == {"job": "told"}
    assert 0 < rate <= 64 / 0.05
    ((labels, ratio),) = metrics["strata_job_goodput_ratio"]
    assert labels == {"job": "told"}
    assert 0.7 < ratio < 0.8
    spent = {each["cause"]: value for each, value in metrics["strata_job_time_seconds"]}
    assert spent["save"] == 3.0
    assert 9.0 <= spent["step"] < 10.0


async def test_a_save_is_measured_from_its_begin_and_from_its_last_ack() -> None:
    shown = Shown()
    shown.lead()
    shown.job("a", members=2)
    shown.save("a", 5, CheckpointState.OPEN, ranks=2)
    for rank, acked_s in enumerate((2.0, 3.0)):
        shown.clock_s = acked_s
        shown.put(
            KEYS.job("a").ack(5, 1, "a5", rank),
            Ack(digest="d", size_bytes=1, worker=WorkerId("w0"), incarnation=1),
        )
    shown.clock_s = 3.5
    shown.save("a", 5, CheckpointState.COMMITTED, ranks=2)
    labels = {"backend": "file", "type": "full"}
    metrics = await exposed(shown)
    assert metrics["strata_checkpoint_save_seconds_sum"] == [(labels, 3.5)]
    assert metrics["strata_checkpoint_commit_seconds_sum"] == [(labels, 0.5)]
    shown.save("a", 6, CheckpointState.OPEN, ranks=2)
    shown.save("a", 6, CheckpointState.ABORTED, ranks=2)
    shown.save("a", 7, CheckpointState.COMMITTED, ranks=2)  # this save began before the replica started
    assert (await exposed(shown))["strata_checkpoint_save_seconds_count"] == [(labels, 1)]


async def test_a_replica_without_traffic_has_each_counter_and_histogram_of_the_page_under_its_type() -> None:
    """A dashboard can then show a metric before its first event, such as the first save."""
    body, _content_type = await Exposition(Shown()).answer("")
    exposed = {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in text_string_to_metric_families(body.decode())
    }
    rows = re.findall(r"^\| `(strata_\w+)` \|[^|]*\| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 60
    assert exposed.items() >= dict(rows).items()


async def test_a_scrape_yields_to_other_tasks_after_each_job() -> None:
    shown = Shown()
    shown.lead()
    jobs = 50
    for number in range(jobs):
        shown.job(f"job-{number}", members=2)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    serving = asyncio.create_task(other())
    await exposed(shown)
    serving.cancel()
    assert turns > jobs


async def test_histograms_are_cumulated() -> None:
    shown = Shown()
    child = shown.measures.round_seconds.child()
    for value in (0.001, 0.03, 999.0):
        child.observe(value)
    buckets = {
        labels["le"]: value for labels, value in (await exposed(shown))["strata_barrier_round_seconds_bucket"]
    }
    assert (buckets["0.005"], buckets["0.05"], buckets["+Inf"]) == (1, 2, 3)


async def test_label_values_are_escaped() -> None:
    shown = Shown()
    shown.version = 'a"b\\c\nd'
    assert (await exposed(shown))["strata_build_info"][0][0]["version"] == 'a"b\\c\nd'
