"""The `strata-chaos` command: its output, its exit codes and the files and processes it leaves."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strata_chaos import backends
from strata_chaos.backends import sweeper
from tests.conftest import Need
from tests.processes import Record, Talker

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 150.0
ROOT = Path(__file__).resolve().parents[3]
BARRIERS = """
title = "a test's own"
duration_s = 10
recovery_s = 60

[[workload]]
name = "barriers"
clients = 2
members = 2
barriers = true
"""

SAVES = """
[[workload]]
name = "checkpoints"
clients = 2
members = 2
"""


def fault(name: str, at_s: float, hold_s: float) -> str:
    return f'\n[[fault]]\nname = "{name}"\nat_s = {at_s}\nhold_s = {hold_s}\n'


class Chaos:
    """Starts the command on the test's own scenario."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "runs"
        self.record = Record()
        self.talkers: list[Talker] = []

    def start(self, *words: str) -> Talker:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'chaos'}"}
        command = [sys.executable, "-m", "strata_chaos", *words]
        talker = Talker(command, name="strata-chaos", record=self.record, env=environment)
        self.talkers.append(talker)
        return talker

    def run(self, scenario: str, *words: str) -> Talker:
        path = self.folder / "own.toml"
        path.write_text(scenario)
        return self.start("run", "--scenario", str(path), "--out", str(self.out), *words)

    def ended(self, talker: Talker) -> int:
        """Return the exit code once every process that the command started has ended."""
        code = talker.join(LIMIT_S)
        talker.wait_quiet()
        return code

    def report(self) -> dict[str, Any]:
        (path,) = self.out.glob("*/report.json")
        body: dict[str, Any] = json.loads(path.read_text())
        return body

    def printed(self) -> str:
        return "\n".join(str(event.get("text", event)) for event in self.record.events)


@pytest.fixture
def chaos(tmp_path: Path, etcd_bin: Path) -> Iterator[Chaos]:
    it = Chaos(tmp_path)
    yield it
    for talker in it.talkers:
        talker.child.kill()
        talker.join()
        talker.wait_quiet(LIMIT_S)


@pytest.mark.slow
def test_a_passing_run_gets_the_same_verdict_when_judged_again(chaos: Chaos) -> None:
    script = fault("kill-leader", 1, 3) + fault("etcd-leader-change", 6, 1)
    expect = "\n[expect]\nno_member_dies = true\nno_new_generation = true\nno_barrier_fails = true\n"

    code = chaos.ended(chaos.run(BARRIERS + script + expect, "--seed", "5", "--backend", "process"))

    assert code == 0, chaos.printed()
    report = chaos.report()
    assert report["verdict"] == "pass"
    assert [(i["fault"], i["effective"]) for i in report["injuries"]] == [
        ("kill-leader", True),
        ("etcd-leader-change", True),
    ]
    assert "was ended by SIGKILL" in report["injuries"][0]["evidence"]
    assert report["operations"]["barrier"]["ok"] > 10
    assert report["injuries"][0]["barrier_s"] is not None
    (folder,) = chaos.out.iterdir()
    assert (folder / "report.txt").read_text().startswith("PASS")
    assert not (folder / "cluster").exists(), "a run that passed keeps its histories only"

    checked = chaos.ended(chaos.start("check", str(folder), "--json"))

    assert checked == 0, chaos.printed()


@pytest.mark.slow
def test_a_failed_expectation_is_exit_1(chaos: Chaos) -> None:
    """The scenario must fail: its fault kills a member, and its expectation is that no member dies."""
    scenario = BARRIERS + fault("kill-member", 1, 2) + "\n[expect]\nno_member_dies = true\n"

    code = chaos.ended(chaos.run(scenario, "--duration", "5", "--backend", "process"))

    assert code == 1, chaos.printed()
    (folder,) = chaos.out.iterdir()
    assert (folder / "cluster").exists(), "the logs of a run that failed are kept"
    assert [finding["checker"] for finding in chaos.report()["findings"]] == ["expectation"]
    assert chaos.ended(chaos.start("check", str(folder))) == 1


@pytest.mark.slow
def test_a_run_whose_fault_had_no_effect_exits_with_2(chaos: Chaos) -> None:
    """This scenario has no ranks under an agent, so the fault finds no target."""
    scenario = BARRIERS + fault("kill-rank", 1, 1)

    code = chaos.ended(chaos.run(scenario, "--duration", "3", "--backend", "process"))

    assert code == 2, chaos.printed()
    assert chaos.report()["sentence"] == "UNKNOWN: without effect: kill-rank (1)"


@pytest.mark.slow
def test_a_process_that_ends_by_itself_is_a_violation(chaos: Chaos) -> None:
    """The test itself kills the process; the nemesis knows nothing of the kill."""
    running = chaos.run(BARRIERS, "--duration", "4", "--backend", "process")
    chaos.record.wait_line("all is well", limit_s=LIMIT_S)
    (pid,) = [pid for pid, words in running.family().items() if "--replica=coordinator-2 " in words]

    os.kill(pid, signal.SIGKILL)

    assert chaos.ended(running) == 1, chaos.printed()
    (finding,) = chaos.report()["findings"]
    assert finding["checker"] == "processes"
    assert f"coordinator-2 (pid {pid}) was ended by SIGKILL by itself" in finding["message"]
    assert chaos.report()["restarts"] == 1, "and it was started again"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "restore-from-backup",
        # tests/integration/controlplane drills these two at every change
        pytest.param("restore-in-place", marks=pytest.mark.campaign),
        pytest.param("rebuild-from-storage", marks=pytest.mark.campaign),
    ],
)
def test_a_lost_etcd_is_restored_under_load(chaos: Chaos, name: str) -> None:
    code = chaos.ended(chaos.run(BARRIERS + SAVES + fault(name, 3, 1), "--backend", "process"))

    assert code == 0, chaos.printed()
    (injury,) = chaos.report()["injuries"]
    assert injury["effective"]
    judged = {f"{rule['checker']}/{rule['rule']}": rule["judged"] for rule in chaos.report()["rules"]}
    assert judged["restores/committed-kept"] > 0
    assert judged["restores/lineage"] == 1


@pytest.mark.slow
def test_a_restore_that_misses_newer_checkpoints_is_a_violation(chaos: Chaos) -> None:
    """The fault breaks the restore on purpose: the command gets no storage root, so it finds no newer checkpoints."""
    scenario = BARRIERS + SAVES + fault("restore-without-storage", 3, 1)

    code = chaos.ended(chaos.run(scenario, "--backend", "process"))

    assert code == 1, chaos.printed()
    found = {finding["checker"] for finding in chaos.report()["findings"]}
    assert "restores/committed-kept" in found


def test_a_run_that_breaks_down_exits_with_3(chaos: Chaos) -> None:
    scenario = BARRIERS.replace('"barriers"', '"no_such_program"') + fault("kill-leader", 1, 1)

    code = chaos.ended(chaos.run(scenario, "--backend", "process"))

    assert code == 3, chaos.printed()
    assert "no_such_program" in chaos.report()["broken"]


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--scenario", "earthquake"),
        ("run", "--scenario", "smoke", "--duration", "0.5"),
        ("run", "--scenario", "reject-between-replicas", "--backend", "process"),
        ("run", "--seeds", "one-two"),
        ("check", "nowhere"),
    ],
)
def test_invalid_arguments_are_refused_with_a_hint(chaos: Chaos, words: tuple[str, ...]) -> None:
    code = chaos.ended(chaos.start(*words))

    assert code == 3, chaos.printed()
    assert "error: " in chaos.printed()
    assert "hint: " in chaos.printed()
    assert "Traceback" not in chaos.printed()


@pytest.mark.journey
def test_ctrl_c_heals_the_faults_and_ends_the_run(chaos: Chaos) -> None:
    running = chaos.run(
        BARRIERS + fault("freeze-leader", 1, 100), "--duration", "110", "--backend", "process"
    )
    chaos.record.wait_line("freeze-leader: coordinator", limit_s=LIMIT_S)

    running.signal(signal.SIGINT)

    assert chaos.ended(running) == 2, chaos.printed()
    assert "freeze-leader: healed" in chaos.printed()
    assert chaos.report()["cut_short"]


def killed(chaos: Chaos, backend: str) -> int:
    """Run the command, SIGKILL it while a fault is active, and return its pid."""
    running = chaos.run(BARRIERS + fault("freeze-leader", 1, 100), "--duration", "110", "--backend", backend)
    chaos.record.wait_line("freeze-leader: coordinator", limit_s=LIMIT_S)
    prefix = sweeper.prefix_of(running.pid)
    assert bool(sweeper.namespaces(prefix)) == (backend == "netns")

    running.child.kill()

    assert running.join() == -signal.SIGKILL
    running.wait_quiet(LIMIT_S)
    assert not sweeper.namespaces(prefix)
    return running.pid


def test_nothing_outlives_a_run_that_is_killed(chaos: Chaos) -> None:
    killed(chaos, "process")


@pytest.fixture
def netns(need: Need) -> None:
    why_not = backends.ALL["netns"].available()
    need("netns", not why_not, why_not)


@pytest.mark.usefixtures("netns")
def test_no_namespace_outlives_a_run_that_is_killed(chaos: Chaos) -> None:
    pid = killed(chaos, "netns")

    assert not Path(f"/sys/class/net/sc{pid}").exists(), "nor our end of its link"


@pytest.mark.slow
@pytest.mark.usefixtures("netns")
def test_replicas_that_reject_each_other_harm_no_member_or_barrier(chaos: Chaos) -> None:
    expect = "\n[expect]\nno_member_dies = true\nno_new_generation = true\nno_barrier_fails = true\n"
    scenario = BARRIERS + fault("reject-pair", 1, 5) + expect

    code = chaos.ended(chaos.run(scenario, "--duration", "8", "--backend", "netns"))

    assert code == 0, chaos.printed()
    (injury,) = chaos.report()["injuries"]
    assert injury["effective"]
    assert "packets met by the rules" in injury["evidence"]


@pytest.mark.slow
@pytest.mark.usefixtures("netns")
def test_members_whose_sessions_are_reset_come_back_within_the_grace(chaos: Chaos) -> None:
    expect = "\n[expect]\nno_member_dies = true\nno_new_generation = true\nno_barrier_fails = true\n"
    scenario = BARRIERS + fault("reset-sessions", 1, 0.4) + expect

    code = chaos.ended(chaos.run(scenario, "--duration", "6", "--backend", "netns"))

    assert code == 0, chaos.printed()
    (injury,) = chaos.report()["injuries"]
    assert injury["effective"]
    assert "packets met by the rules" in injury["evidence"]


def test_the_sweeper_removes_the_namespace_of_a_dead_process(
    netns: None,
    left_behind: Callable[[], str],
) -> None:
    name = left_behind()
    assert name in sweeper.namespaces()

    assert name in sweeper.sweep_abandoned()

    assert name not in sweeper.namespaces()


@pytest.fixture
def left_behind() -> Iterator[Callable[[], str]]:
    """Make a network namespace named after a process that never existed."""
    name = f"{sweeper.NAMES}{2**22 + 7}-1-host-1"

    def make() -> str:
        assert os.system(f"ip netns add {name}") == 0
        return name

    yield make
    sweeper.sweep(name)
