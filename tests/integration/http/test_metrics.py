"""`/metrics` after known traffic, and compared with its page in docs/."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import ROOT, Nodes, StartCluster
from tests.integration.http.test_http import fetch, scrape
from tests.processes import LIMIT_S

PAGE = ROOT / "docs" / "observability.md"
STEPS, EVERY, RANKS = 10, 5, 3
Value = Callable[..., float]


@pytest.fixture(scope="module")
def busy(start_module_cluster: StartCluster) -> LocalCluster:
    """A cluster for this module alone, so that its counts are known."""
    return start_module_cluster(coordinators=3)


def of(address: str) -> Value:
    samples = scrape(address)

    def value(name: str, **labels: str) -> float:
        return samples[name, frozenset(labels.items())]

    return value


@pytest.mark.timeout(180)
@pytest.mark.journey
def test_the_counters_match_the_traffic(busy: LocalCluster, nodes: Nodes, tmp_path: Path) -> None:
    before = [of(c.http) for c in busy.coordinators]
    arguments = ("--storage", str(tmp_path), "--steps", str(STEPS), "--every", str(EVERY))
    options = ("--min-workers", "2")
    one = nodes.run(busy.endpoints, "saving", *arguments, node="a", options=(*options, "--slots", "2"))
    other = nodes.run(busy.endpoints, "saving", *arguments, node="b", options=options)
    assert (one.join(LIMIT_S), other.join(LIMIT_S)) == (0, 0)
    ends = nodes.record.of("end")
    assert len(ends) == RANKS
    assert {tuple(end["steps"]) for end in ends} == {(5, 10)}

    after = [of(c.http) for c in busy.coordinators]
    job = {"job": nodes.job}

    def of_saves(name: str, **labels: str) -> list[float]:
        """Return each replica's value; the module's cluster has had no other save of this kind."""
        samples = [scrape(c.http) for c in busy.coordinators]
        key = name, frozenset({"backend": "file", "type": "full", **labels}.items())
        return [each.get(key, 0.0) for each in samples]

    def grown(name: str, **labels: str) -> list[float]:
        return [now(name, **labels) - then(name, **labels) for then, now in zip(before, after, strict=True)]

    # plus the barrier at which the generation joins, and the barriers at which ranks compare their saves
    rounds = STEPS + 1 + STEPS // EVERY
    assert grown("strata_barrier_rounds_total", result="released") == [rounds] * 3, "each replica sees each"
    assert grown("strata_barrier_rounds_total", result="broken") == [0] * 3
    assert sum(grown("strata_barrier_arrivals_total", source="member")) == rounds * RANKS
    assert sum(grown("strata_barrier_round_seconds_count")) >= rounds
    assert grown("strata_checkpoints_total", state="committed") == [STEPS / EVERY] * 3
    assert grown("strata_checkpoints_total", state="aborted") == [0] * 3
    saves = STEPS // EVERY
    for phase in ("snapshot", "write"):
        assert sum(of_saves("strata_checkpoint_phase_seconds_count", phase=phase)) == saves * RANKS
        assert sum(of_saves("strata_checkpoint_phase_seconds_sum", phase=phase)) > 0
        assert sum(of_saves("strata_checkpoint_phase_bytes_total", phase=phase)) > 0
    for name in ("strata_checkpoint_save_seconds", "strata_checkpoint_commit_seconds"):
        assert of_saves(f"{name}_count") == [saves] * 3, "each replica sees each"
    for commit_s, save_s in zip(
        of_saves("strata_checkpoint_commit_seconds_sum"),
        of_saves("strata_checkpoint_save_seconds_sum"),
        strict=True,
    ):
        assert 0 < commit_s <= save_s
    assert grown("strata_generations_total") == [1] * 3
    assert sum(grown("strata_member_removals_total", reason="left")) == 2
    assert sum(grown("strata_member_removals_total", reason="transport_failed")) == 0
    assert sum(grown("strata_fenced_writes_total", outcome="written")) >= 2
    assert sum(grown("strata_etcd_request_seconds_count", kind="txn", outcome="ok")) >= rounds
    assert min(grown("strata_watch_events_total")) >= rounds
    for now in after:
        assert now("strata_job_generation", **job) == 1
        assert now("strata_job_world_size", **job) == RANKS
        assert now("strata_job_members", **job) == 0
        assert now("strata_job_phase", **job, phase="done") == 1
        assert now("strata_job_latest_step", **job) == STEPS
        assert now("strata_job_open_barriers", **job) == 0
        assert now("strata_peers_ready") == 2
        assert now("strata_audit_differences_total") == 0


def test_the_page_documents_exactly_the_exposed_metrics(busy: LocalCluster) -> None:
    exposed = set()
    for coordinator in busy.coordinators:
        code, body = fetch(coordinator.http, "/metrics")
        assert code == 200
        for family in text_string_to_metric_families(body):
            assert family.documentation, family.name
            exposed.add(f"{family.name}_total" if family.type == "counter" else family.name)
    table = re.findall(r"^\| `((?:strata|process|python)_\w+)`", PAGE.read_text(), re.MULTILINE)
    assert len(table) == len(set(table))
    ours = {name for name in exposed if name.startswith("strata_")}
    assert ours == {name for name in table if name.startswith("strata_")}
    assert {name for name in table if not name.startswith("strata_")} <= exposed


def test_the_documented_labels_are_the_real_ones(busy: LocalCluster) -> None:
    documented = {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(r"^\| `(\w+)` \|([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    }
    for coordinator in busy.coordinators:
        for name, labels in scrape(coordinator.http):
            family = re.sub(r"_(bucket|count|sum)$", "", name)
            if name.startswith("strata_"):
                assert {label for label, _ in labels} - {"le"} == documented[family], name
