"""Typical first-day mistakes.

Each must end with at most five lines from Strata, and the last of them must state the remedy. Output of ranks, such
as the program's own traceback, does not count. The traceback must have no frame of Strata, and no mistake may be
tried three times.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import RANKS, ROOT, Nodes, run_strata
from tests.storage import rclone_server
from tests.storage.small_disk import Need, mounted

pytestmark = pytest.mark.timeout(180)

NO_BLAME = "127.0.0.1:1"
KEY, SECRET = "strata-test", "not-a-secret-at-all"
TRAIN = (str(RANKS / "mistaken.py"), "--storage")
_OWN_LINE = re.compile(r"\S*\d\d:\d\d:\d\d\S* \[|error: |hint: ")
"""The beginning of Strata's own lines: of the log, or of the error that ends a command."""


@dataclass
class Place:
    """The cluster, folder and environment in which a mistake is made."""

    cluster: LocalCluster
    nodes: Nodes
    folder: Path
    need: Need
    env: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, options: tuple[str, ...] = (), python: bool = True) -> tuple[int, list[str]]:
        """Run a job to its end; with `python`, the command is a script for this interpreter."""
        words = ("-e", self.cluster.endpoints, "--job", self.nodes.job, "--log-format", "plain", *options)
        return self.strata("run", *words, "--", *((sys.executable,) if python else ()), *command)

    def strata(self, *words: str) -> tuple[int, list[str]]:
        code, output = run_strata(*words, env={**os.environ, "PYTHONPATH": str(ROOT), **self.env})
        return code, output.splitlines()


Made = tuple[int, list[str]]


@pytest.fixture
def place(
    cluster: LocalCluster, nodes: Nodes, tmp_path: Path, need: Need, monkeypatch: pytest.MonkeyPatch
) -> Place:
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    return Place(cluster, nodes, tmp_path, need)


@pytest.fixture
def port() -> Iterator[str]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


# -- the mistakes ----------------------------------------------------------------------------


def wrong_endpoint(place: Place) -> Made:
    return place.strata("status", "--endpoints", NO_BLAME, "--timeout-s", "1")


def no_etcd_for_a_coordinator(place: Place) -> Made:
    place.env["STRATA_ETCD_WAIT_S"] = "1"
    words = ("--replica", "x", "--listen", "127.0.0.1:0", "--http", "", "--log-format", "plain")
    return place.strata("coordinator", "--etcd", NO_BLAME, *words)


def no_etcd_on_this_machine(place: Place) -> Made:
    missing = str(place.folder / "etcd")
    return place.strata("dev", "--etcd", missing, "--data", str(place.folder / "data"))


def s3(place: Place, bucket: str, *, secret: str = SECRET) -> Made:
    """Start a job that saves into `bucket` of an S3 server whose only bucket is `there`."""
    with rclone_server.serving(place.folder, key=KEY, secret=SECRET) as url:
        (place.folder / "root" / "there").mkdir()
        place.env |= {
            "AWS_ENDPOINT_URL_S3": url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_CONFIG_FILE": str(place.folder / "none"),
        }
        return place.run(*TRAIN, f"s3://{bucket}/runs")


def wrong_credentials(place: Place) -> Made:
    return s3(place, "there", secret="another")


def missing_bucket(place: Place) -> Made:
    return s3(place, "not-there")


def missing_script(place: Place) -> Made:
    return place.run("trian.py")


def crash_at_import(place: Place) -> Made:
    script = place.folder / "train.py"
    script.write_text("import trch\n")
    return place.run(str(script))


def begun(place: Place, storage: Path, *words: str) -> Made:
    """Train to the end, then resume with these arguments."""
    code, output = place.run(*TRAIN, str(storage))
    assert code == 0, output
    return place.run(*TRAIN, str(storage), *words, options=("--resume",))


def other_shape(place: Place) -> Made:
    return begun(place, place.folder / "root", "--numbers", "5")


def other_key(place: Place) -> Made:
    return begun(place, place.folder / "root", "--more")


def full_disk(place: Place) -> Made:
    place.env["STRATA_TRAIN_SAVE_GRACE_S"] = "1"
    with mounted(place.folder / "disk", place.need, size="1m") as disk:
        disk.fill()
        # longer than the agent waits for ranks that do not stop by themselves
        return place.run(*TRAIN, str(disk.folder / "root"), "--slow-end-s", "3")


def another_jobs_name(place: Place) -> Made:
    place.nodes.run(place.cluster.endpoints, "plain", "--wait")
    place.nodes.record.wait("start")
    return place.run(*TRAIN, "/nowhere")


def the_same_job_twice(place: Place) -> Made:
    place.nodes.run(place.cluster.endpoints, "plain", "--wait")
    place.nodes.record.wait("start")
    return place.run(str(RANKS / "plain.py"), "--wait", options=("--worker-id", "node-1"))


MISTAKES: list[tuple[Callable[[Place], Made], int, str]] = [
    (wrong_endpoint, 3, "hint: check the endpoints (--endpoints or STRATA_ENDPOINTS)"),
    (no_etcd_for_a_coordinator, 3, "hint: check that it runs, and etcd.endpoints (--etcd)"),
    (no_etcd_on_this_machine, 2, 'hint: for one member pip install "strata-control[embedded]"'),
    (wrong_credentials, 78, "look at AWS_ACCESS_KEY_ID, AWS_PROFILE or the role"),
    (missing_bucket, 78, "create the bucket, or look for a slip in its name"),
    (missing_script, 2, "hint: give its path from the folder in which strata run is started"),
    (crash_at_import, 78, "mend this, and run the command again"),
    (other_shape, 78, "weights was saved as float64[4], and is float64[5] here"),
    (other_key, 78, "bias is not in the checkpoint, which holds ['strata', 'weights']"),
    (full_disk, 75, "free some space, or keep fewer checkpoints"),
    (another_jobs_name, 4, "hint: choose another name by --job, or stop that run first"),
    (the_same_job_twice, 4, "hint: stop that process, or use another worker id"),
]
"""Each mistake with its exit status and the remedy in its message."""


def at_the_end(printed: list[str]) -> list[str]:
    """Return Strata's own lines after the end of the last rank, or all lines if there are none."""
    ends = [at for at, line in enumerate(printed) if "rank.ended" in line]
    own = [line for line in printed[ends[-1] if ends else 0 :] if _OWN_LINE.match(line)]
    return own if ends else printed


def generations(printed: list[str]) -> int:
    return sum("rank.started" in line for line in printed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "status", "remedy"), MISTAKES, ids=[mistake.__name__ for mistake, _, _ in MISTAKES]
)
def test_a_typical_mistake_ends_in_at_most_five_lines_that_say_what_to_do(
    place: Place, mistake: Callable[[Place], Made], status: int, remedy: str
) -> None:
    code, output = mistake(place)
    shown = "\n".join(output)
    assert code == status, shown
    own = at_the_end(output)
    assert 0 < len(own) <= 5, shown
    assert remedy in shown
    assert f'File "{ROOT}/strata' not in shown, "a frame of ours"
    tries = 2 if mistake is crash_at_import else 1
    assert generations(output) <= tries, shown
    if status == 78:
        assert "mend this, and run the command again" in own[-1], shown
    elif status != 75:
        assert own[-1].startswith("hint: "), shown
        assert "Traceback" not in shown


@pytest.mark.slow
def test_a_taken_port_is_named_by_dev_and_by_a_coordinator(place: Place, port: str) -> None:
    etcd = ",".join(place.cluster.etcd.endpoints)
    for words in (
        ("dev", "--port", port, "--data", str(place.folder / "data")),
        ("coordinator", "--etcd", etcd, "--cluster", "mistakes", "--listen", f"127.0.0.1:{port}"),
    ):
        code, output = place.strata(*words, *(("--log-format", "plain") if words[0] == "coordinator" else ()))
        assert code == 2, output
        assert len(output) <= 5, output
        assert port in output[-2]
        assert "taken" in output[-2] or "in use" in output[-2]
        assert output[-1].startswith("hint: ")


@pytest.mark.slow
def test_a_job_failed_by_a_checkpoint_mismatch_restarts_without_a_flag_once_fixed(place: Place) -> None:
    storage = place.folder / "root"
    code, _ = begun(place, storage, "--numbers", "5")
    assert code == 78
    code, output = place.run(*TRAIN, str(storage))
    assert code == 0, output
    assert any("started again by" in line for line in output)
