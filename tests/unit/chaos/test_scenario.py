from __future__ import annotations

import re
from pathlib import Path

import pytest

from strata.errors import ConfigError
from strata_chaos import faults, scenario
from strata_chaos.scenario import Scenario, parse

LEAST = 'title = "t"\nduration_s = 10\n'


def test_a_minimal_scenario_has_three_etcd_members_and_three_coordinators() -> None:
    found = parse(LEAST, name="least")

    assert (found.topology.etcd, found.topology.coordinators) == (3, 3)
    assert found.backends == scenario.BACKENDS
    assert not found.fault_names
    assert not found.expect.no_member_dies


def test_every_setting_of_a_scenario_is_read() -> None:
    found = parse(
        LEAST
        + """
        backends = ["netns"]
        recovery_s = 20
        [topology]
        etcd = 1
        coordinators = 2
        detect_s = 2
        tls = true
        [[workload]]
        name = "barriers"
        clients = 5
        members = 5
        barriers = true
        options = { rounds = 7, fast = true }
        [[fault]]
        name = "kill-leader"
        at_s = 1
        hold_s = 2
        every_s = 4
        [random]
        gap_s = [1, 2]
        hold_s = [0, 1]
        overlap = 3
        [random.weights]
        cut-pair = 0.5
        [expect]
        no_member_dies = true
        """,
        name="whole",
    )

    assert found.backends == ("netns",)
    assert (found.topology.etcd, found.topology.tls) == (1, True)
    assert found.workloads[0].options == {"rounds": "7", "fast": "true"}
    assert found.script[0].every_s == 4
    assert found.random is not None
    assert found.random.weights == {"cut-pair": 0.5}
    assert found.random.overlap == 3
    assert found.fault_names == ("kill-leader", "cut-pair")
    assert found.expect.no_member_dies


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("duration_s = 10", "title must be a text"),
        ('title = "t"', "duration_s must be a number"),
        (LEAST + "surprise = 1", "no field 'surprise'"),
        (LEAST + "[topology]\netcds = 3", "no field 'etcds'"),
        (LEAST + "[topology]\netcd = 2", "1 or 3 members"),
        (LEAST + 'backends = ["cloud"]', "process, netns"),
        (LEAST + "workload = 3", r"\[\[workload\]\]"),
        (LEAST + '[[workload]]\nname = "b"\nclients = 0', "at least 1"),
        (LEAST + '[[workload]]\nname = "b"\nbarriers = 1', "true or false"),
        (LEAST + '[[fault]]\nname = "f"\nat_s = 1', "hold_s must be a number"),
        (LEAST + '[[fault]]\nname = "f"\nat_s = 1\nhold_s = 5\nevery_s = 2', "below hold_s"),
        (LEAST + "[random]\n", "no fault has a weight"),
        (LEAST + "[random]\ngap_s = [2, 1]\n[random.weights]\nf = 1", "least, most"),
        (LEAST + "[random]\ngap_s = [0, 0]\n[random.weights]\nf = 1", "gap_s must reach"),
        (LEAST + "[expect]\nno_worries = true", "no field 'no_worries'"),
        ("title = ", "not TOML"),
    ],
)
def test_an_invalid_scenario_is_refused_with_the_cause(text: str, printed: str) -> None:
    with pytest.raises(ConfigError, match=printed) as refused:
        parse(text, name="wrong")

    assert "wrong" in str(refused.value)


def test_an_unknown_scenario_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(ConfigError) as refused:
        scenario.find("earthquake")

    assert "smoke" in refused.value.hint


def test_a_scenario_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(LEAST)

    assert scenario.find(str(path)).name == "mine"
    with pytest.raises(ConfigError, match="cannot read"):
        scenario.find(str(tmp_path / "other.toml"))


SHIPPED = [scenario.read(path) for path in scenario.shipped()]


def test_the_required_scenarios_are_shipped() -> None:
    assert {found.name for found in SHIPPED} >= {
        "smoke",
        "mixed",
        "leader-kill",
        "leader-freeze",
        "reject-between-replicas",
        "replica-wakes",
        "replica-cut-from-etcd",
        "etcd-leader-change",
        "etcd-majority-loss",
        "all-replicas-down",
        "ranks-die",
    }


@pytest.mark.parametrize("found", SHIPPED, ids=lambda found: found.name)
def test_a_shipped_scenario_can_be_run(found: Scenario) -> None:
    assert set(found.fault_names) <= set(faults.ALL)
    assert found.workloads
    assert all(Path(f"chaos/strata_chaos/workloads/{w.name}.py").exists() for w in found.workloads)
    for backend in found.backends:
        usable = faults.usable(backend)
        assert all(entry.name in usable for entry in found.script), f"{found.name} on {backend}"


@pytest.mark.parametrize(
    "name",
    [
        "reject-between-replicas",
        "replica-wakes",
        "replica-cut-from-etcd",
        "etcd-leader-change",
        "sessions-reset",
    ],
)
def test_harmless_scenarios_expect_no_dead_member_and_no_new_generation(name: str) -> None:
    """The scenario expects no dead member and no new generation, and runs on the namespace backend."""
    found = scenario.find(name)

    assert found.expect.no_member_dies
    assert found.expect.no_new_generation
    assert "netns" in found.backends
    assert re.search("member", found.title)


def test_a_custom_scenario_is_recorded_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(LEAST)

    assert scenario.find("mine.toml").scenario_argument == str(tmp_path / "mine.toml")
    assert scenario.find("smoke").scenario_argument == "smoke"
