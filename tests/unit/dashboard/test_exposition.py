"""`/metrics` of a replica that is filled by hand."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from strata.core.coordinator_record import Coordinator
from strata.dashboard.exposition import Exposition
from strata.v1.members_pb2 import DeviceStatus, MemberDevices
from tests.unit.dashboard.rig import KEYS, Shown


def exposed(shown: Shown) -> dict[str, list[tuple[dict[str, str], float]]]:
    body, _content_type = Exposition(shown).answer("")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_gauges_are_what_the_view_says_now() -> None:
    shown = Shown()
    shown.lead()
    shown.job("a", members=3, slots=2)
    shown.arrive("a", "meet", [0], size=6)
    metrics = exposed(shown)
    assert metrics["strata_job_world_size"] == [({"job": "a"}, 6)]
    assert metrics["strata_job_members"] == [({"job": "a"}, 3)]
    assert metrics["strata_job_open_barriers"] == [({"job": "a"}, 1)]
    assert metrics["strata_job_phase"] == [({"job": "a", "phase": "running"}, 1)]
    assert metrics["strata_sessions"] == [({}, 7)]
    assert "strata_job_latest_step" not in metrics, "there is none"


async def test_a_replica_that_is_gone_is_not_ready_and_says_for_how_long() -> None:
    shown = Shown()
    shown.lead()
    assert "strata_replica_unreachable_seconds" not in exposed(shown)
    shown.put(KEYS.coordinator("r2"), Coordinator(unreachable_since_unix_ms=1_699_999_986_000))
    metrics = exposed(shown)
    assert metrics["strata_replica_ready"] == [({"replica": "r1"}, 1), ({"replica": "r2"}, 0)]
    assert metrics["strata_replica_unreachable_seconds"] == [({"replica": "r2"}, 14)]
    assert metrics["strata_replicas"] == [({}, 1)]


async def test_a_job_that_cannot_be_read_spoils_no_scrape() -> None:
    shown = Shown()
    shown.lead()
    shown.job("good", members=1)
    shown.put(KEYS.job("spoilt").head, b"{not json")
    shown.put(f"{KEYS.jobs}no name!/spec", b"{}")
    assert exposed(shown)["strata_job_world_size"] == [({"job": "good"}, 1)]


async def test_a_finding_names_rank_host_device_and_cause_as_its_sentence_does() -> None:
    shown = Shown()
    shown.lead()
    shown.job("a", members=1, slots=2, host="h7")
    sick = [DeviceStatus(index=index, fault="Xid 79") for index in (0, 1)]
    member = MemberDevices(worker_id="w0", incarnation=shown.world("a").members[0].incarnation, devices=sick)
    shown.board.note_devices("a", member, own=True)
    found = shown.diagnosis("a").findings
    labels = [labels for labels, _value in exposed(shown)["strata_job_finding"]]
    assert [each["device"] for each in labels] == ["0", "1"], "two devices are two findings"
    for finding, label in zip(found, labels, strict=True):
        assert finding.host == label["host"] == "h7"
        assert label["host"] in finding.text
        assert label["device"] in finding.text
        assert label["cause"] in finding.text
        assert (label["job"], label["kind"], label["rank"]) == ("a", "device", finding.rank_runs)


async def test_histograms_are_cumulated() -> None:
    shown = Shown()
    child = shown.measures.round_seconds.child()
    for value in (0.001, 0.03, 999.0):
        child.observe(value)
    buckets = {labels["le"]: value for labels, value in exposed(shown)["strata_barrier_round_seconds_bucket"]}
    assert (buckets["0.005"], buckets["0.05"], buckets["+Inf"]) == (1, 2, 3)


async def test_label_values_are_escaped() -> None:
    shown = Shown()
    shown.version = 'a"b\\c\nd'
    assert exposed(shown)["strata_build_info"][0][0]["version"] == 'a"b\\c\nd'
