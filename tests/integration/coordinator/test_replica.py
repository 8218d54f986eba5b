"""Coordinator processes on a real etcd: the leader acts, and a deposed leader writes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Executor
from strata.core.ids import BootId, InstanceId, WorkerId
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import JobSpec, Replica, WorldHead, encode
from strata.core.kv.txn import Put, Txn
from strata.core.kv.view import View
from strata.core.leadership.leader import leader_of
from strata.core.members.membership import decide_leave, decide_register
from strata.core.members.registration import Registration
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.devcluster.local_cluster import LocalCluster, LocalCoordinator
from strata.etcd import EtcdStore
from strata.processes.children import Child
from tests.cluster_fixtures import StartCluster

LIMIT_S = 40.0
KEYS = ClusterKeys("default")


@pytest.fixture(scope="module")
def three(start_module_cluster: StartCluster) -> LocalCluster:
    return start_module_cluster(etcd_members=1, coordinators=3)


class Members:
    """Members that exist only as keys, served by a replica that also exists only as a key."""

    def __init__(self, mirror: Mirror, executor: Executor) -> None:
        self.mirror = mirror
        self.executor = executor
        self.job = KEYS.job(f"job-{uuid.uuid4().hex}")
        self.instance = InstanceId(uuid.uuid4().hex)

    async def replica(self) -> None:
        """Write the key of the instance that serves the members, so that they are not orphans."""
        record = encode(Replica(instance=self.instance, address="127.0.0.1:1"))
        put = Put(key=KEYS.replica("of-the-test"), value=record)
        await self.executor.execute(Txn(success=(put,)))

    async def register(self, worker: str, *, most: int) -> None:
        registration = Registration(
            worker=WorkerId(worker),
            boot=BootId(f"boot-{worker}"),
            spec=JobSpec(max_workers=most, max_no_progress_generations=99),
        )
        await self.executor.settle(
            lambda view: decide_register(JobView(view, self.job), registration, served_by=self.instance)
        )

    async def leave(self, worker: str) -> None:
        held = JobView(self.mirror.view, self.job).worker(worker)
        assert held is not None
        await self.executor.settle(
            lambda view: decide_leave(JobView(view, self.job), WorkerId(worker), held.create_revision)
        )

    async def head(self, generation: int) -> WorldHead:
        """Return the world's head once it has at least that generation."""

        def there(view: View) -> bool:
            head = JobView(view, self.job).head()
            return head is not None and head.record.generation >= generation

        await self.mirror.wait_until(there)
        head = JobView(self.mirror.view, self.job).head()
        assert head is not None
        assert head.record.generation == generation
        return head.record


@pytest.fixture
async def members(three: LocalCluster) -> AsyncIterator[Members]:
    async with (
        asyncio.timeout(2 * LIMIT_S),
        await EtcdStore.connect(three.etcd.endpoints) as store,
        asyncio.TaskGroup() as tasks,
    ):
        mirror = Mirror(store, KEYS, new_uid="never used")
        executor = Executor(store, mirror)
        running = [tasks.create_task(mirror.run()), tasks.create_task(executor.run())]
        await mirror.started()
        made = Members(mirror, executor)
        await made.replica()
        yield made
        for task in running:
            task.cancel()


def epoch_of(view: View) -> int:
    leader = leader_of(view, KEYS)
    return leader.create_revision if leader is not None else 0


async def leader_of_cluster(three: LocalCluster) -> LocalCoordinator:
    return await asyncio.to_thread(three.leader)


@pytest.mark.timeout(120)
@pytest.mark.journey
async def test_a_new_leader_acts_after_the_old_one_is_killed(three: LocalCluster, members: Members) -> None:
    leader = await leader_of_cluster(three)
    for worker in "ab":
        await members.register(worker, most=2)
    before = await members.head(1)
    leader.child.kill()
    await asyncio.to_thread(leader.child.join, LIMIT_S)
    killed_at = time.monotonic()
    await members.leave("b")
    after = await members.head(2)
    assert after.epoch > before.epoch
    assert time.monotonic() - killed_at < 15, "a lease of 6 s, and what a busy machine adds"
    await asyncio.to_thread(leader.restart)
    await asyncio.to_thread(leader.wait_ready, LIMIT_S)


@pytest.mark.timeout(120)
async def test_a_frozen_leader_that_wakes_writes_nothing_and_follows(
    three: LocalCluster, members: Members
) -> None:
    leader = await leader_of_cluster(three)
    for worker in "abc":
        await members.register(worker, most=3)
    before = await members.head(1)
    leader.child.pause()
    try:
        await members.leave("c")  # the frozen replica sees it only after it wakes
        after = await members.head(2)
        assert after.epoch > before.epoch
    finally:
        leader.child.resume()
    await asyncio.to_thread(leader.wait_ready, LIMIT_S)
    epoch = epoch_of(members.mirror.view)
    await members.leave("b")
    last = await members.head(3)
    assert last.epoch == after.epoch == epoch
    status = await asyncio.to_thread(three.status)
    assert status.leader_epoch == epoch
    assert status.leader != leader.name


@pytest.mark.timeout(120)
async def test_a_leader_that_shuts_down_deletes_its_keys(three: LocalCluster, members: Members) -> None:
    leader = await leader_of_cluster(three)
    epoch = epoch_of(members.mirror.view)
    began = time.monotonic()
    leader.child.request_stop()
    await members.mirror.wait_until(lambda view: epoch_of(view) > epoch)
    assert time.monotonic() - began < 3, "without waiting for a lease"
    assert await asyncio.to_thread(leader.child.join, LIMIT_S) == 0
    await members.mirror.fresh()
    assert members.mirror.view.get(KEYS.replica(leader.name)) is None
    await asyncio.to_thread(leader.restart)
    await asyncio.to_thread(leader.wait_ready, LIMIT_S)


# -- how a process ends ------------------------------------------------------------------------


def coordinator(log: Path, *arguments: str) -> Child:
    return Child.start(
        [
            sys.executable,
            "-m",
            "strata",
            "coordinator",
            "--log-format=json",
            "--http=127.0.0.1:0",
            *arguments,
        ],
        log=log,
    )


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def ends(child: Child) -> tuple[int, str]:
    """Return the exit code and the whole log."""
    code = child.join(LIMIT_S)
    assert child.log is not None
    log = child.log.read_text()
    assert "Traceback" not in log
    return code, log


def test_a_coordinator_without_etcd_logs_its_wait_once_and_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_ETCD_WAIT_S", "5")
    nowhere = free_address()
    code, output = ends(coordinator(tmp_path / "log", f"--etcd={nowhere}", f"--listen={free_address()}"))
    assert code == 3
    assert output.count("waiting_for_etcd") == 1
    assert nowhere in output
    assert output.splitlines()[-1] == "hint: check that it runs, and etcd.endpoints (--etcd)"


def test_a_coordinator_that_waits_for_etcd_stops_on_sigterm(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = coordinator(log, f"--etcd={free_address()}", f"--listen={free_address()}")
    deadline = time.monotonic() + LIMIT_S
    while not log.exists() or "coordinator_starts" not in log.read_text():
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    code, output = ends(child)
    assert code == 0
    assert "coordinator_ended" in output


def test_a_taken_port_is_an_error_of_the_configuration(tmp_path: Path, etcd: EtcdCluster) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        code, output = ends(
            coordinator(
                tmp_path / "log",
                f"--etcd={','.join(etcd.endpoints)}",
                f"--listen={address}",
                "--cluster=taken-port",
            )
        )
    assert code == 2
    assert f"cannot serve at {address}" in output


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_two_replicas_of_one_name_are_refused(tmp_path: Path, etcd: EtcdCluster) -> None:
    common = (f"--etcd={','.join(etcd.endpoints)}", "--cluster=one-name", "--replica=twin")
    first = coordinator(tmp_path / "first", *common, f"--listen={free_address()}")
    deadline = time.monotonic() + LIMIT_S
    while "replica_registered" not in first.tail():
        assert time.monotonic() < deadline
        assert first.poll() is None, first.tail()
        time.sleep(0.05)
    code, output = ends(coordinator(tmp_path / "second", *common, f"--listen={free_address()}"))
    assert code == 4
    assert "another replica named twin" in output
    assert first.poll() is None
    assert first.stop() == 0
