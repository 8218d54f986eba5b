"""Storage that fails for a while (a full disk, S3 that answers 503) delays saves, but not the training.

STRATA_HELD_S is the duration of the failure (default: 15 s).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.checkpoint.format.marker import NAME as MARKER
from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import CheckpointNotFound
from tests.cluster_fixtures import ROOT, Nodes
from tests.integration.cli.test_cli_checkpoints import Commands
from tests.polling import until
from tests.processes import Record, Talker
from tests.storage.s3_stub import StubS3, serving
from tests.storage.small_disk import Need, SmallDisk, mounted

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

HELD_S = float(os.environ.get("STRATA_HELD_S", "15"))
EVERY_STEPS = 10
LIMIT_S = 60.0
EVERYTHING = ("put", "get", "head", "delete", "list", "create", "part", "complete", "uploads")
START = "and the start waits"


@pytest.fixture
def disk(need: Need, tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted(tmp_path / "disk", need) as disk:
        yield disk


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubS3]:
    with serving(StubS3()) as server:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": server.url,
        }.items():
            monkeypatch.setenv(name, value)
        yield server


class Training:
    """A job of two ranks on two nodes that saves every few steps."""

    def __init__(self, cluster: LocalCluster, nodes: Nodes, record: Record, folder: Path) -> None:
        self._endpoints = cluster.endpoints
        self._nodes = nodes
        self.record = record
        self._until = folder / "over"
        self.talkers: list[Talker] = []

    def start(self, storage: str, **settings: str) -> int:
        """Start both nodes; return the step from which their ranks continue."""
        known = len(self.record.of("begun"))
        self.launch(storage, **settings)
        begun = self.record.wait("begun", count=known + 2)[known:]
        (step,) = {int(e["step"]) for e in begun}
        return step

    def launch(self, storage: str, **settings: str) -> None:
        """Start both nodes without waiting for their ranks to begin."""
        env: dict[str, str | None] = {
            "STRATA_TRAIN_SAVE_EVERY_STEPS": str(EVERY_STEPS),
            "STRATA_TRAIN_KEEP_COUNT": "2",
            **settings,
        }
        self.talkers = [
            self._nodes.run(
                self._endpoints,
                "held",
                *("--storage", storage, "--until", str(self._until)),
                node=node,
                options=("--min-workers", "2"),
                env=env,
            )
            for node in ("a", "b")
        ]

    def kill_rank_1(self) -> None:
        """Kill rank 1; return once both ranks are started again."""
        started = self.record.of("rank.started")
        os.kill([e["pid"] for e in started if e["rank"] == 1][-1], signal.SIGKILL)
        self.record.wait("rank.started", count=len(started) + 2, limit_s=LIMIT_S)

    def wait_starts(self, *, beyond: int) -> int:
        """Wait until storage has delayed two more starts of ranks than `beyond`; return the number of such starts."""
        self.record.until(
            "two starts that wait", lambda _: len(self.lines(START)) >= beyond + 2, limit_s=LIMIT_S
        )
        return len(self.lines(START))

    def latest(self) -> int:
        with (
            CoordinatorClient.connect(self._endpoints, job=self._nodes.job) as client,
            contextlib.suppress(CheckpointNotFound),
        ):
            return int(client.latest_checkpoint().step)
        return 0

    def wait_committed(self, *, beyond: int, limit_s: float = LIMIT_S) -> int:
        """Return the step of the newest checkpoint once it is above `beyond`."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if (step := self.latest()) > beyond:
                return step
            time.sleep(0.2)
        raise AssertionError(f"no checkpoint beyond step {beyond} within {limit_s:g} s")

    def trained(self) -> int:
        return max((int(e["step"]) for e in self.record.of("step", rank=0)), default=0)

    def lines(self, part: str) -> list[str]:
        return [e["text"] for e in self.record.of("line") if part in e["text"]]

    def is_held_and_goes_on(self) -> int:
        """Assert that the training goes on while no save is possible; return the step of the newest checkpoint."""
        self.record.wait_line("no checkpoint since step", limit_s=LIMIT_S)
        before, begun = self.latest(), self.trained()
        time.sleep(HELD_S / 2)
        middle = self.trained()
        time.sleep(HELD_S / 2)
        after = self.trained()
        assert begun + EVERY_STEPS < middle < after - EVERY_STEPS, "it trains on"
        assert self.latest() == before, "and nothing can be saved"
        return before

    def finish(self) -> None:
        """Let the training end."""
        self._until.touch()

    def codes(self) -> list[int]:
        return [talker.join(LIMIT_S) for talker in self.talkers]

    def ends_well(self) -> None:
        self.finish()
        assert self.codes() == [0, 0]
        assert {e["generation"] for e in self.record.of("begun")} == {1}, "no generation ended"
        assert {e["step"] for e in self.record.of("end")} == {self.latest()}, "the last step is saved"


@pytest.fixture
def training(cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path) -> Training:
    return Training(cluster, nodes, record, tmp_path)


def test_a_full_disk_holds_saves_while_the_training_continues(training: Training, disk: SmallDisk) -> None:
    training.start(str(disk.folder / "checkpoints"))
    training.wait_committed(beyond=0)
    disk.fill()
    held_at = training.is_held_and_goes_on()
    assert disk.temporary() == [], "a try that failed leaves nothing"
    disk.clear()
    training.wait_committed(beyond=held_at)
    training.ends_well()
    assert training.lines("disk full"), "the log names the reason"


def test_a_lower_keep_count_frees_space_on_a_full_disk(
    training: Training, disk: SmallDisk, cluster: LocalCluster, nodes: Nodes
) -> None:
    """The test runs the commands of docs/operate/full-checkpoint-disk.md."""
    training.start(str(disk.folder / "checkpoints"), STRATA_TRAIN_KEEP_COUNT="100")
    training.record.wait_line("no checkpoint since step", limit_s=LIMIT_S)
    held_at = training.latest()
    commands = Commands(cluster.endpoints, nodes.job)
    assert "kept: the 2 newest" in commands.run("retention", "--keep-count", 2)
    until(lambda: "it is to be deleted" in commands.run("gc"), "the leader marks nothing", limit_s=LIMIT_S)
    training.wait_committed(beyond=held_at)
    training.ends_well()


def test_s3_answering_503_holds_saves_while_the_training_continues(training: Training, stub: StubS3) -> None:
    training.start("s3://bucket/held")
    training.wait_committed(beyond=0)
    faults = [stub.fail(kind, status=503, times=1 << 30) for kind in ("put", "create", "part", "complete")]
    held_at = training.is_held_and_goes_on()
    for fault in faults:
        fault.times = 0
    training.wait_committed(beyond=held_at)
    training.ends_well()
    assert training.lines("503"), "the log names the reason"


def test_after_the_grace_the_job_saves_to_the_tier_that_works_and_stops_with_75(
    training: Training, disk: SmallDisk, stub: StubS3
) -> None:
    storage = str(disk.folder / "checkpoints")
    settings = {"STRATA_TRAIN_REPLICA": "s3://bucket/held", "STRATA_TRAIN_SAVE_GRACE_S": "4"}
    training.start(storage, **settings)
    before = training.wait_committed(beyond=0)
    faults = [stub.fail(kind, status=503, times=1 << 30) for kind in ("put", "create", "part", "complete")]
    disk.fill()
    training.record.wait_line("all ranks are requested to stop", limit_s=LIMIT_S)
    for fault in faults:
        fault.times = 0
    assert training.codes() == [75, 75]
    (step,) = {e["step"] for e in training.record.of("preempted")}
    assert training.latest() == step > before, "the last step is in the second storage"
    disk.clear()
    assert training.start(storage, **settings) == step
    training.finish()
    assert training.codes() == [0, 0]


def test_a_run_with_an_unsaved_last_step_exits_with_75_and_the_next_run_resumes(
    training: Training, disk: SmallDisk
) -> None:
    storage = str(disk.folder / "checkpoints")
    training.start(storage, STRATA_TRAIN_SAVE_GRACE_S="4")
    training.wait_committed(beyond=0)
    disk.fill()
    training.finish()
    assert training.codes() == [75, 75]
    saved = training.latest()
    disk.clear()
    assert training.start(storage, STRATA_TRAIN_SAVE_GRACE_S="4") == saved
    assert training.codes() == [0, 0]
    assert training.latest() > saved


def test_a_signal_ends_the_wait_for_a_last_save_that_is_held(
    nodes: Nodes, record: Record, disk: SmallDisk, tmp_path: Path
) -> None:
    """The process is standalone, so no agent ends it."""
    over = tmp_path / "over"
    arguments = ("--storage", str(disk.folder / "checkpoints"), "--until", str(over))
    alone = nodes.start(
        *(sys.executable, str(ROOT / "tests" / "ranks" / "held.py"), *arguments),
        name="alone",
        env={"STRATA_TRAIN_SAVE_EVERY_STEPS": str(EVERY_STEPS), "STRATA_TRAIN_PREEMPT_GRACE_S": "2"},
    )
    record.wait("step", count=EVERY_STEPS + 1)
    # the message names a saved step, so a saved step must exist
    until(lambda: any(disk.folder.glob(f"checkpoints/step-*/{MARKER}")), limit_s=LIMIT_S)
    disk.fill()
    record.wait_line("no checkpoint since step", limit_s=LIMIT_S)
    over.touch()
    record.wait("step", count=2 * EVERY_STEPS + 1)
    time.sleep(1.0)
    alone.signal(signal.SIGTERM)
    assert alone.join(LIMIT_S) == 75
    record.wait_line("THE LAST STEP IS NOT SAVED")


# -- at the start of a rank -------------------------------------------------------------------


def test_a_rank_restarted_during_an_s3_outage_waits_for_the_storage(training: Training, stub: StubS3) -> None:
    training.start("s3://bucket/held")
    training.wait_committed(beyond=0)
    faults = [stub.fail(kind, status=503, times=1 << 30) for kind in EVERYTHING]
    training.record.wait_line("no checkpoint since step", limit_s=LIMIT_S)
    saved, begun, waiting = training.latest(), len(training.record.of("begun")), 0
    for _ in range(2):
        training.kill_rank_1()
        waiting = training.wait_starts(beyond=waiting)
    assert all(talker.child.poll() is None for talker in training.talkers)
    assert len(training.record.of("begun")) == begun, "nobody begins meanwhile"
    for fault in faults:
        fault.times = 0
    again = training.record.wait("begun", count=begun + 2, limit_s=LIMIT_S)[begun:]
    assert {e["step"] for e in again} == {saved}
    training.finish()
    assert training.codes() == [0, 0]


def test_a_new_job_on_a_full_disk_waits_at_its_start(training: Training, disk: SmallDisk) -> None:
    disk.fill()
    storage, settings = str(disk.folder / "checkpoints"), {"STRATA_TRAIN_SAVE_GRACE_S": "6"}
    training.launch(storage, **settings)
    waiting = training.wait_starts(beyond=0)
    assert training.codes() == [75, 75], "after the grace"
    training.launch(storage, **settings)
    waiting = training.wait_starts(beyond=waiting)
    for talker in training.talkers:
        talker.signal(signal.SIGTERM)
    assert training.codes() == [75, 75], "a signal ends the wait"
    training.launch(storage, **settings)
    training.wait_starts(beyond=waiting)
    disk.clear()
    training.record.wait("begun", count=2)
    training.finish()
    assert training.codes() == [0, 0]
