"""Every workload on a real cluster whose leader is killed: the judge passes it, and rejects a falsified history."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from strata.processes.children import Child
from strata_chaos.history import History
from strata_chaos.judgement.judge import Result, judge
from strata_chaos.workloads.training_rank import BATCH, EPOCH
from tests.cluster_fixtures import ROOT, StartCluster
from tests.polling import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

WORKLOADS = ("barriers", "checkpoints", "churn", "training", "watches")
EPOCH_COMMITTED = "a save after a whole epoch"
ENOUGH = {
    "barrier": 60,
    "checkpoint.save": 15,
    "member.alive": 15,
    "member.heartbeat": 15,
    "watch.message": 30,
    EPOCH_COMMITTED: 1,
}
"""Number of operations of each kind to complete before the leader is killed, and again after the kill."""
LIMIT_S = 90.0
POLL_S = 0.5


@pytest.fixture(scope="module")
def folder(start_module_cluster: StartCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run of all workloads, with the leader killed in the middle."""
    cluster = start_module_cluster()
    run = tmp_path_factory.mktemp("run")
    observer = program(run, "observer", "observer", "--etcd", ",".join(cluster.etcd.endpoints))
    workloads = [
        program(
            run, f"workloads.{name}", name, "--endpoints", cluster.endpoints, "--job", name, "--seed", "7"
        )
        for name in WORKLOADS
    ]
    try:
        done = work_done(run, Counter())
        kill_leader(cluster)
        work_done(run, done)
        for workload in workloads:
            workload.request_stop()
        assert [workload.join(LIMIT_S) for workload in workloads] == [0] * len(workloads)
        assert observer.stop(LIMIT_S) == 0
        yield run
    finally:
        for child in (*workloads, observer):
            child.kill()


def program(run: Path, module: str, name: str, *arguments: str) -> Child:
    command = [sys.executable, "-m", f"strata_chaos.{module}", "--history", str(run / f"{name}.jsonl")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'chaos'}"}
    return Child.start([*command, *arguments], name=name, env=env, log=run / "logs" / f"{name}.log")


def counted(run: Path) -> Counter[str]:
    """Count the operations that succeeded so far, by kind."""
    ended = [r for r in History(run) if not r.begun and r.outcome == "ok"]
    found = Counter(r.op for r in ended)
    found[EPOCH_COMMITTED] = sum(
        r.op == "checkpoint.save" and r.args["job"] == "training" and r.args["step"] > EPOCH // BATCH
        for r in ended
    )
    return found


def work_done(run: Path, before: Counter[str]) -> Counter[str]:
    """Return the counts once each kind's count is `ENOUGH` above that in `before`."""
    found: Counter[str] = Counter()

    def enough() -> bool:
        nonlocal found
        found = counted(run)
        return all(found[op] - before[op] >= needed for op, needed in ENOUGH.items())

    until(enough, lambda: f"there is not enough to judge: {found}", limit_s=LIMIT_S)
    return found


def kill_leader(cluster: LocalCluster) -> None:
    leader = cluster.leader()
    leader.child.kill()
    leader.child.join()


def test_the_recorded_run_passes_every_checker(folder: Path) -> None:
    verdict = judge(folder)
    assert verdict.result is Result.PASS, verdict.summary()
    judged = {f"{each.checker}/{each.rule}": each.judged for each in verdict.coverage}
    # rules that need a deposed leader, an old generation, a new generation after a commit or ten calm
    # seconds in a row apply only in longer runs
    rare = {
        "leadership/leader-present",
        "worlds/restore-named",
        "catalog/restore-exact",
        "registry/hand-over",
        "watches/not-silent",
    }
    idle = {rule for rule, count in judged.items() if not count}
    restores = {rule for rule in idle if rule.startswith("restores/")}  # etcd was not lost in this run
    assert idle - restores <= rare
    assert judged["leadership/one-instance"] >= 2, "the leader was killed"


def test_one_changed_line_is_a_violation(folder: Path, tmp_path: Path) -> None:
    """The payload of one barrier release is changed in one client's history."""
    copy = tmp_path / "run"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("storage-*", "logs"))
    file = next(copy.glob("barriers.0-*.jsonl"))
    lines = file.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"payloads"' in line)
    body = json.loads(lines[number])
    body["result"]["payloads"]["0"] = "AAAA"
    lines[number] = json.dumps(body)
    file.write_text("".join(f"{line}\n" for line in lines))
    verdict = judge(copy)
    assert verdict.result is Result.VIOLATION
    (violation,) = [v for v in verdict.violations if v.checker == "barriers"]
    assert violation.rule == "release-matches-etcd"
    assert violation.evidence[0].startswith(f"{file.name}:{number + 1}: ")
